"""Paged-attention kernels: arrays in, arrays out."""

from pagefork.kernels.dispatch import in_place, paged_attention, prefill_attention, write_kv
from pagefork.kernels.spec import Attention
from pagefork.kernels.verify import KernelMismatch, Result, prepare, selftest

__all__ = [
    "Attention",
    "KernelMismatch",
    "Result",
    "in_place",
    "paged_attention",
    "prefill_attention",
    "prepare",
    "selftest",
    "write_kv",
]
