"""The suite notices every fault in `faults`: each is seeded into the text, and the trial it names must fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from pagefork.kernels import metal
from pagefork.kernels.spec import Attention, KernelSpec, Rotation

from .cases import TOLERANCE, Case, Mutation, Options, attend, error, expected, make_case, variant
from .faults import FAULTS, Fault
from .harness import KernelFault
from .rotations import make_turn, tolerance, turn_error
from .writes import make_step, right

BASE = Attention(mx.float16, heads=4, kv_heads=2, head_dim=64, block_size=16)
RAGGED = [330, 0, 37, 1]
SPLIT = 8

DECODES: dict[str, tuple[Case, int]] = {
    "decode": (make_case(BASE, RAGGED), SPLIT),
    "whole": (make_case(BASE, RAGGED), 1),
    "uneven": (make_case(variant(BASE, head_dim=80), RAGGED), SPLIT),
    "wide": (make_case(variant(BASE, heads=18, kv_heads=1, head_dim=128), [70, 0, 37]), SPLIT),
    "window": (make_case(variant(BASE, window=True), RAGGED, Options(window=35)), SPLIT),
    "sinks": (make_case(variant(BASE, sinks=True), RAGGED), SPLIT),
    "softcap": (make_case(variant(BASE, softcap=True), RAGGED, Options(softcap=3.0)), SPLIT),
}

# Heads of which a part is rotated, more of them than one threadgroup takes.
TURN = Rotation(mx.float16, heads=20, kv_heads=4, head_dim=64, block_size=16, dims=32)
TURNS = {
    check: make_turn(kind, slots=[37, -1, 3], positions=[5, 90, 700], scale=0.5)
    for check, kind in {"turn": TURN, "neighbours": replace(TURN, traditional=True)}.items()
}


def unchanged(spec: KernelSpec) -> KernelSpec:
    return spec


def passes(check: str, mutation: Mutation) -> bool:
    """Whether the tests of this suite would be content with the changed kernels."""
    try:
        if check == "write":
            return right(make_step(mx.float16, slots=[70, -1, 127], copies=[(1, 5, 9), (2, 3, 16)]), mutation=mutation)
        if check in TURNS:
            return turn_error(TURNS[check], mutation=mutation) <= tolerance(TURN.dtype)
        case, cores = DECODES[check]
        with np.errstate(all="ignore"):
            return error(attend(case, cores=cores, mutation=mutation).out, expected(case)) <= TOLERANCE[BASE.dtype]
    except KernelFault as fault:
        assert "does not compile" not in str(fault), fault
        return False


def seeded(fault: Fault) -> Mutation:
    """The change of a spec that `fault` makes, in the one kernel whose file it names or in the decode header."""
    text = (Path(metal.__file__).parent / "metal" / f"{fault.kernel}.metal").read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.name}: its text occurs {text.count(fault.old)} times"
    broken = text.replace(fault.old, fault.new)

    def change(spec: KernelSpec) -> KernelSpec:
        return replace(spec, source=spec.source.replace(text, broken), header=spec.header.replace(text, broken))

    return change


@pytest.mark.parametrize("check", [*DECODES, *TURNS, "write"])
def test_the_trials_pass_without_a_fault(check: str) -> None:
    assert passes(check, unchanged)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_noticed(fault: Fault) -> None:
    assert not passes(fault.check, seeded(fault))


def test_the_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
