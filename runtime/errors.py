"""What can go wrong, a sentence each; every error says what to do next."""

from __future__ import annotations


class PageforkError(Exception):
    """Root of everything that pagefork raises on purpose."""


def own(error: BaseException) -> BaseException:
    """An error for one of the tasks that it is raised in: a copy, since one object keeps the tracebacks of all.

    It is made without `__init__`. Errors of others come back as they are.
    """
    if not isinstance(error, PageforkError):
        return error
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    if hasattr(error, "__notes__"):
        copy.__notes__ = list(error.__notes__)
    copy.__cause__, copy.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copy


class InvalidRequest(PageforkError):
    """An argument is out of its range or of the wrong type; nothing was changed."""


class UnsupportedModel(PageforkError):
    """The model's attention cannot be routed through the block pool; it is refused rather than run wrong."""


class ModelUnavailable(PageforkError):
    """The model could not be found or fetched."""


class KernelMismatch(PageforkError):
    """A GPU kernel fails its self-test on this device and `strict=True` forbids the slow path; open without it."""


class ContextOverflow(PageforkError):
    """The tokens do not fit in the model's context; nothing was appended."""


class PoolExhausted(PageforkError):
    """Too few blocks could be had in time, or the pool has not as many; what was asked for was not done.

    wanted: blocks that were missing. free: those to be had, cached ones included. total: those of the pool.
    """

    def __init__(self, wanted: int, free: int, total: int) -> None:
        super().__init__(
            f"{wanted} block(s) wanted, {free} of {total} free; close or truncate sequences, "
            "or open the runtime with more blocks"
        )
        self.wanted, self.free, self.total = wanted, free, total


class SequenceClosed(PageforkError):
    """The sequence was closed, by `close()`, by a crash of its actor or with its runtime; make or fork another."""


class SequenceBusy(PageforkError):
    """Another task is waiting for the sequence's next token; finish or `aclose()` that generation first."""


class DeadlineExceeded(PageforkError):
    """No answer came in time; the request was withdrawn and nothing was changed."""


class WorkerDied(PageforkError):
    """The allocator, the worker or its engine thread crashed; the runtime is of no more use: leave it, open another."""


class RuntimeClosed(PageforkError):
    """The runtime has left its `async with` block; open another."""


class BlocksLeaked(PageforkError):
    """At shutdown blocks were still held by nobody alive: a defect of pagefork; please report it."""
