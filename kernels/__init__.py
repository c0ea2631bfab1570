"""Paged-attention kernels: arrays in, arrays out."""

from pagefork.kernels.dispatch import can_rotate, in_place, paged_attention, prefill_attention, rope_and_write, write_kv
from pagefork.kernels.spec import Attention, Rope, Rotation
from pagefork.kernels.verify import KernelMismatch, Result, prepare, selftest

__all__ = [
    "Attention",
    "KernelMismatch",
    "Result",
    "Rope",
    "Rotation",
    "can_rotate",
    "in_place",
    "paged_attention",
    "prefill_attention",
    "prepare",
    "rope_and_write",
    "selftest",
    "write_kv",
]
