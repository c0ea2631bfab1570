"""How many blocks fit beside the weights, for `blocks="auto"`."""

from __future__ import annotations

import os

import mlx.core as mx

from pagefork.runtime.errors import InvalidRequest
from pagefork.runtime.log import log
from pagefork.runtime.models import Model

GPU_SHARE = 0.85
"""Of the memory that a GPU offers, for weights and pool together; the rest is for activations and other programs."""

CPU_SHARE = 0.25
"""Of the memory that is free: on a CPU the weights are computed with at a speed that seldom fills more."""


def blocks_that_fit(model: Model, block_size: int) -> int:
    """Blocks of `block_size` tokens that the device has room for, as many for each group of layers.

    Call it once the weights are loaded. Raises InvalidRequest where not even one block fits.
    """
    groups = len(model.groups.windows)
    values = groups * sum(2 * heads * dim for heads, dim in model.pools)  # of a token
    block_bytes = values * block_size * model.dtype.size
    room = _room()
    blocks = min(int(room // block_bytes), (2**31 - 1) // (block_size * groups))
    log.info(
        "memory_planned",
        blocks=blocks,
        tokens=blocks * block_size,
        pool_mb=round(blocks * block_bytes / 1e6),
        weights_mb=round(model.weight_bytes / 1e6),
        room_mb=round(room / 1e6),
    )
    if blocks < 1:
        raise InvalidRequest(
            f"no memory is left for a single block of {block_bytes} bytes beside the weights; "
            "take a smaller model or block_size"
        )
    return blocks


def _room() -> float:
    """Bytes for the pool."""
    if mx.default_device().type == mx.DeviceType.gpu:
        facts = mx.device_info()
        for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if name in facts:
                return max(0.0, float(facts[name]) * GPU_SHARE - mx.get_active_memory())
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE
