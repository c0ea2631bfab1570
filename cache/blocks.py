"""The fixed pool of block ids: who is free, and how many references each block has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
IdsLike = npt.NDArray[np.integer] | Sequence[int]
_Index = npt.NDArray[np.intp]

_SMALL = 48  # up to here Python's set beats NumPy's
_INT32, _INTP = np.dtype(np.int32), np.dtype(np.intp)
_ONE = np.int32(1)  # of the refcounts' dtype: ufunc.at is an order of magnitude slower on mixed ones
_MAX_SLOTS = 2**31 - 1  # slots are int32


class BlockError(Exception):
    """Root of what a BlockPool refuses; a refused call leaves the pool as it was."""


class BlocksExhausted(BlockError):
    """Fewer blocks are free than were asked for: free some, or ask for fewer."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class _BlocksRefused(BlockError):
    reason = "refused"

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = tuple(ids)
        shown = ", ".join(map(str, self.ids[:8])) + (", ..." if len(self.ids) > 8 else "")
        super().__init__(f"{self.reason}: {shown}")


class DoubleFree(_BlocksRefused):
    """More references were released than the blocks in `ids` have."""

    reason = "more references released than the blocks have"


class RetainOfFreeBlock(_BlocksRefused):
    """The blocks in `ids` are free, so there is no reference to add to: allocate them first."""

    reason = "cannot retain free blocks"


class BlockOutOfRange(_BlocksRefused):
    """The pool has no blocks of these `ids`."""

    reason = "no such blocks in the pool"


class BlockPool:
    """`num_blocks` reference-counted block ids, handed out last-freed first, lowest first on a new pool.

    A call on an array of ids equals the same calls on its ids one by one, repeats included, except that it takes
    effect whole or not at all. Cost depends on the number of ids in the call, never on `num_blocks`. Not thread-safe.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`block_size`: token positions per block. ValueError unless both are positive and all slots fit int32."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be positive, not {num_blocks} and {block_size}")
        if num_blocks * block_size > _MAX_SLOTS:
            raise ValueError(f"{num_blocks} blocks of {block_size} positions exceed {_MAX_SLOTS} int32 slots")
        self._num_blocks = num_blocks
        self._block_size = block_size
        # Twice as long as need be: an id that is no block's finds no reference in the upper half.
        self._counts = np.zeros(2 * num_blocks, dtype=np.int32)
        self._refcounts = self._counts[:num_blocks]
        # The stack of free ids is `_free[_used:]`, its top at `_used`; index dtype saves a conversion per call.
        self._free: _Index = np.arange(num_blocks, dtype=np.intp)
        self._used = 0
        self._peak_used = 0
        self._view = self._refcounts.view()
        self._view.flags.writeable = False
        self._ones = [np.ones(n, dtype=np.int32).tobytes() for n in range(_SMALL + 1)]

    def __repr__(self) -> str:
        return f"BlockPool({self._num_blocks} x {self._block_size}, {self.num_free} free)"

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Token positions per block."""
        return self._block_size

    @property
    def num_free(self) -> int:
        return self._num_blocks - self._used

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self._used

    @property
    def peak_used(self) -> int:
        """The most blocks that were ever in use at once."""
        return self._peak_used

    @property
    def refcounts(self) -> npt.NDArray[np.int32]:
        """References of every block, int32 `[num_blocks]`: a live, read-only view."""
        return self._view

    def allocate(self, n: int) -> Ids:
        """Take `n` free blocks, each with one reference; returns their ids, int32 `[n]`.

        All or nothing: BlocksExhausted when fewer are free. ValueError when `n` is negative.
        """
        start = self._used
        stop = start + n
        if stop > self._num_blocks:
            raise BlocksExhausted(n, self._num_blocks - start)
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        taken = self._free[start:stop]
        self._refcounts[taken] = 1
        self._used = stop
        if stop > self._peak_used:
            self._peak_used = stop
        return taken.astype(_INT32)

    def retain(self, ids: IdsLike) -> None:
        """Add one reference per entry of `ids`, a 1-d integer array or sequence.

        BlockOutOfRange, RetainOfFreeBlock: for the whole call. TypeError when `ids` are not integers.
        """
        index = self._in_range(_as_index(ids))
        held = self._refcounts[index]
        if len(held) and not held.min():
            raise RetainOfFreeBlock(index[held == 0].tolist())
        np.add.at(self._refcounts, index, _ONE)

    def free(self, ids: IdsLike) -> int:
        """Release one reference per entry of `ids`; returns how many blocks became free.

        BlockOutOfRange, DoubleFree: for the whole call. TypeError when `ids` are not integers.
        """
        index = _as_index(ids)
        n = len(index)
        if n <= _SMALL and self._sole_references(index, n):
            self._counts[index] = 0
            return self._push(index)
        return self._release(self._in_range(index))

    def _sole_references(self, index: _Index, n: int) -> bool:
        """Whether `index` names `n` distinct blocks of one reference each; the common case, so without reductions."""
        try:
            held = self._counts[index].tobytes()
        except IndexError:
            return False
        return held == self._ones[n] and len(set(index.tolist())) == n

    def _release(self, index: _Index) -> int:
        refcounts = self._refcounts
        held = refcounts[index]
        np.subtract.at(refcounts, index, _ONE)
        left = refcounts[index]
        if len(left) and left.min() < 0:
            np.add.at(refcounts, index, _ONE)
            raise DoubleFree(np.unique(index[left < 0]).tolist())
        at_zero = left == 0
        gone = index[at_zero]
        if len(gone) and held[at_zero].max() > 1:
            gone = _by_last_occurrence(gone)
        return self._push(gone)

    def _push(self, gone: _Index) -> int:
        n = len(gone)
        top = self._used
        self._free[top - n : top] = gone[::-1]
        self._used = top - n
        return n

    def _in_range(self, index: _Index) -> _Index:
        # Seen as unsigned, a negative id is a huge one.
        if len(index) and index.view(np.uintp).max() >= self._num_blocks:
            raise BlockOutOfRange(index[(index < 0) | (index >= self._num_blocks)].tolist())
        return index


def _as_index(ids: IdsLike) -> _Index:
    given = ids if isinstance(ids, np.ndarray) else np.asarray(ids, dtype=None if len(ids) else np.intp)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise TypeError(f"block ids must be a 1-d integer array, not {given.dtype} of {given.ndim} dimensions")
    return given.astype(_INTP)


def _by_last_occurrence(ids: _Index) -> _Index:
    """Each id once, ordered by its last entry: the release that frees the block."""
    unique, from_end = np.unique(ids[::-1], return_index=True)
    return unique[np.argsort(-from_end)]
