"""Layers in groups, a block table for each: so those with windows give back blocks that the others keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 8
"""Groups at most: each has a table of its own in every step."""

WORTHWHILE = 0.9
"""Of what all layers take for a token that is far back, what those that keep it may take at most."""


@dataclass(frozen=True)
class Groups:
    """How layers share the pools: a block holds K and V of one group, those of its layer i in pool i.

    windows: of each group the widest window of its layers; None for those that see everything, which come first.
    places: for each layer its group and its pool.
    """

    windows: tuple[int | None, ...] = (None,)
    places: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def pools(self) -> int:
        return 1 + max(pool for _, pool in self.places)

    def layer(self, pool: int) -> int:
        """A layer that has its K and V in this pool; all of them are of one shape."""
        return next(layer for layer, (_, other) in enumerate(self.places) if other == pool)


def grouped(windows: Sequence[int | None], shapes: Sequence[tuple[int, int]]) -> Groups:
    """The groups of layers with these windows and (kv_heads, head_dim).

    One where all have a window or none has; where their shapes differ, so that they cannot share a pool; and where it
    would save little.
    """
    layers = range(len(windows))
    kept = [layer for layer in layers if windows[layer] is None]
    slid = sorted((layer for layer in layers if windows[layer] is not None), key=lambda layer: windows[layer] or 0)
    sizes = [size for size in layers[1:] if _room(kept, size) + _room(slid, size) <= MOST * size]
    # A group that is not full leaves its part of the last pools unused.
    size = min(sizes, key=lambda size: (_room(kept, size) + _room(slid, size), -size), default=0)
    mixed = kept and slid and len(set(shapes)) == 1
    if not mixed or not size or _room(kept, size) > WORTHWHILE * len(windows):
        widest = max((window for window in windows if window is not None), default=None)
        return Groups((None if kept else widest,), tuple((0, layer) for layer in layers))
    parts = [part[at : at + size] for part in (kept, slid) for at in range(0, len(part), size)]
    places = {layer: (group, pool) for group, part in enumerate(parts) for pool, layer in enumerate(part)}
    widest_of = [max(windows[layer] or 0 for layer in part) or None for part in parts]
    return Groups(tuple(widest_of), tuple(places[layer] for layer in layers))


def _room(layers: list[int], size: int) -> int:
    """For how many layers the groups of this size have room that these take."""
    return -(-len(layers) // size) * size


@dataclass(frozen=True)
class Window:
    """No query of the groups from `first` on reads more than the `size` last positions: blocks before them go back.

    part: tokens for which blocks are asked at a time beyond those that are computed, or beyond the window's size.
    """

    size: int
    part: int
    first: int = 0


def window_of(windows: Sequence[int | None], num_blocks: int, block_size: int, chunk: int) -> Window | None:
    """The window of groups with these `windows` in a pool, with parts of a prompt chunk where they fit.

    None where no group has one, or the pool cannot hold a whole one for all groups: nothing is given back then.
    """
    widest = max((window for window in windows if window is not None), default=None)
    if widest is None:
        return None
    size = max(widest, 2)  # as `first_needed` counts
    spare = num_blocks // len(windows) - _spread(size, block_size)
    return Window(size, min(chunk, spare * block_size), windows.count(None)) if spare > 0 else None


def longest(window: Window | None, groups: int, num_blocks: int, block_size: int) -> int | None:
    """How many tokens a sequence may have that is alone in a pool; None: any number."""
    if window is None:
        return num_blocks // groups * block_size
    if not window.first:
        return None
    held = _spread(window.size, block_size) + -(-window.part // block_size)
    return (num_blocks - held * (groups - window.first)) // window.first * block_size


def _spread(size: int, block_size: int) -> int:
    """Over how many blocks the positions of a window lie at most."""
    return -(-(size - 1) // block_size) + 1
