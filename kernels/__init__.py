"""Paged-attention kernels: arrays in, arrays out."""

from pagefork.kernels.dispatch import in_place, paged_attention, prefill_attention, rope_and_write, write_kv
from pagefork.kernels.spec import Attention, Rope, Rotation
from pagefork.kernels.verify import KernelMismatch, Result, prepare, selftest

__all__ = [
    "Attention",
    "KernelMismatch",
    "Result",
    "Rope",
    "Rotation",
    "in_place",
    "paged_attention",
    "prefill_attention",
    "prepare",
    "rope_and_write",
    "selftest",
    "write_kv",
]
