"""Paged-attention kernels: arrays in, arrays out."""

from pagefork.kernels.reference import paged_attention, prefill_attention, write_kv

__all__ = ["paged_attention", "prefill_attention", "write_kv"]
