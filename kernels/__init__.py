"""Paged-attention kernels: arrays in, arrays out."""

from pagefork.kernels.dispatch import paged_attention, prefill_attention, write_kv

__all__ = ["paged_attention", "prefill_attention", "write_kv"]
