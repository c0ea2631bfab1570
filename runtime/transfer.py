"""How what a step needs comes to the device, and what it found to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagefork import kernels
from pagefork.kernels.device import device
from pagefork.kernels.host import keep_in_host
from pagefork.runtime.log import log

Host = npt.NDArray[Any]
_PAGE = 1 << 16


class Arrival:
    """Arrays on their way to the host: `pending` may be queued with what else a step computes, and `read` waits."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.pending = list(arrays)

    def read(self) -> list[Host]:
        return [np.array(array) for array in self.pending]


class Transfer:
    """As MLX does it: an array is made from the host's and another is copied to it."""

    def begin(self) -> None:
        """Call this before a step's first `send`: memory of a step that was collected may be used again."""

    def send(self, given: Sequence[Host]) -> list[mx.array]:
        """The same on the device; int32, uint32 or float32 of any shape."""
        return [mx.array(array) for array in given]

    def receive(self, arrays: Sequence[mx.array]) -> Arrival:
        """The same to be read by the host; int32 or float32 of any shape."""
        return Arrival(arrays)

    def close(self) -> None:
        """No more is sent or received; steps may still be under way."""


class CudaTransfer(Transfer):
    """By memory that stays in the host and belongs to one step at a time, see docs/cuda.md.

    MLX makes arrays from the host's in managed memory, moves others there when the host reads them, and gives both,
    freed, to whatever array comes next. Their pages are wherever they were touched last: a kernel that finds one in the
    host waits up to 100 us for it.
    """

    def __init__(self, steps: int) -> None:
        """So many steps may be under way: one is collected before one more begins."""
        self._slots = [(_HostArray(), _HostArray()) for _ in range(steps)]
        self._zero = mx.array(0)
        self._turn = self._used = 0

    def begin(self) -> None:
        self._turn = (self._turn + 1) % len(self._slots)
        self._used = 0

    def send(self, given: Sequence[Host]) -> list[mx.array]:
        stops = list(accumulate((array.size for array in given), initial=self._used))
        array, view = self._slots[self._turn][0].sized(stops[-1])
        for (start, stop), one in zip(pairwise(stops), given, strict=True):
            view[start:stop] = one.ravel().view(np.int32)
        whole, first = array[self._used : stops[-1]] + self._zero, self._used
        self._used = stops[-1]
        parts = [whole[start - first : stop - first] for start, stop in pairwise(stops)]
        return [_shaped(part, one) for part, one in zip(parts, given, strict=True)]

    def works(self) -> bool:
        """Whether what is sent comes back the same."""
        self.begin()
        given: list[Host] = [np.arange(9, dtype=np.int32), np.linspace(-1, 1, 7, dtype=np.float32)]
        found = self.receive(self.send(given)).read()
        return all(np.array_equal(one, other) for one, other in zip(found, given, strict=True))

    def receive(self, arrays: Sequence[mx.array]) -> Arrival:
        array, view = self._slots[self._turn][1].sized(sum(array.size for array in arrays))
        return _Landing(kernels.land(array, arrays), arrays, view)

    def close(self) -> None:
        for slot in self._slots:
            for one in slot:
                one.close()


class _Landing(Arrival):
    def __init__(self, landed: mx.array, arrays: Sequence[mx.array], view: Host) -> None:
        super().__init__([landed])
        self._forms = [(array.shape, np.float32 if array.dtype == mx.float32 else np.int32) for array in arrays]
        self._view = view

    def read(self) -> list[Host]:
        mx.eval(self.pending)
        found, at = [], 0
        for shape, dtype in self._forms:
            count = math.prod(shape)
            found.append(self._view[at : at + count].view(dtype).reshape(shape).copy())
            at += count
        return found


class _HostArray:
    """An array that the host and the device see, of at least the size that was asked for last."""

    def __init__(self) -> None:
        self._hold(1)

    def sized(self, count: int) -> tuple[mx.array, Host]:
        if self._view.size < count:
            self.close()
            self._hold(max(count, 2 * self._view.size))
        return self._array, self._view

    def close(self) -> None:
        keep_in_host(self._view.ctypes.data, self._view.nbytes, False)

    def _hold(self, count: int) -> None:
        pages = -(-count * 4 // _PAGE)
        self._array = mx.array(np.zeros(pages * _PAGE // 4, np.int32))
        self._view = np.array(self._array, copy=False)
        keep_in_host(self._view.ctypes.data, self._view.nbytes)


def transfer(steps: int) -> Transfer:
    """The best for MLX's default device; so many steps may be under way."""
    if device().backend != "cuda":
        return Transfer()
    cuda = CudaTransfer(steps)
    try:
        problem = "" if cuda.works() else "other values come back"
    except Exception as error:  # a kernel that does not compile
        problem = repr(error)
    if not problem:
        return cuda
    cuda.close()
    log.warning("a step's arrays take MLX's slow way to and from the device", problem=problem)
    return Transfer()


_TYPES = {np.dtype(np.float32): mx.float32, np.dtype(np.uint32): mx.uint32}


def _shaped(part: mx.array, like: Host) -> mx.array:
    typed = part.view(_TYPES[like.dtype]) if like.dtype in _TYPES else part
    return typed if like.ndim == 1 else typed.reshape(like.shape)
