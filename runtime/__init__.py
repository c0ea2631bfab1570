"""Actors, the public async API, models."""

from pagefork.runtime import environment as environment  # first: MLX reads it when it starts
from pagefork.runtime.api import Runtime, Sequence
from pagefork.runtime.beam import Beam, BeamSearchParams, Past
from pagefork.runtime.errors import (
    BlocksLeaked,
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    KernelMismatch,
    ModelUnavailable,
    PageforkError,
    PoolExhausted,
    RuntimeClosed,
    SequenceBusy,
    SequenceClosed,
    UnsupportedModel,
    WorkerDied,
)
from pagefork.runtime.generation import Generation, Step
from pagefork.runtime.messages import SamplingParams
from pagefork.runtime.stats import Stats

__all__ = [
    "Beam",
    "BeamSearchParams",
    "BlocksLeaked",
    "ContextOverflow",
    "DeadlineExceeded",
    "Generation",
    "InvalidRequest",
    "KernelMismatch",
    "ModelUnavailable",
    "PageforkError",
    "Past",
    "PoolExhausted",
    "Runtime",
    "RuntimeClosed",
    "SamplingParams",
    "Sequence",
    "SequenceBusy",
    "SequenceClosed",
    "Stats",
    "Step",
    "UnsupportedModel",
    "WorkerDied",
]
