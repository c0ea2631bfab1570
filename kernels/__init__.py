"""Kernels for paged attention and what stands around it in a step of decodes: arrays in, arrays out."""

from pagefork.kernels.dispatch import (
    can_multiply,
    can_rotate,
    in_place,
    linear,
    paged_attention,
    prefill_attention,
    rope_and_write,
    write_kv,
)
from pagefork.kernels.host import land
from pagefork.kernels.spec import Attention, Linear, Rope, Rotation
from pagefork.kernels.verify import KernelMismatch, Result, prepare, selftest

__all__ = [
    "Attention",
    "KernelMismatch",
    "Linear",
    "Result",
    "Rope",
    "Rotation",
    "can_multiply",
    "can_rotate",
    "in_place",
    "land",
    "linear",
    "paged_attention",
    "prefill_attention",
    "prepare",
    "rope_and_write",
    "selftest",
    "write_kv",
]
