"""Projections of one input computed as one: queries, keys and values; gate and up.

A decode step costs the host about the same for every kernel, whatever it computes. So the weights of such projections
are put one below the other, the modules that had them keep views of the rows that were theirs, and a step computes the
whole when the first of them is called. Where a layer does nothing to its queries and keys but rotate them, attention
can take the whole as it is (`rotations`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from pagefork.kernels import Rope
from pagefork.kernels.reference import rotate
from pagefork.runtime.routing import Patch, Step, running

if TYPE_CHECKING:
    from pagefork.runtime.models import Model

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PARAMETERS = ("weight", "scales", "biases", "bias")


class Joint:
    """The projections `parts` as one. They hold views of its weights from now on, so nothing is kept twice."""

    def __init__(self, parts: list[Any], rope: Rope | None) -> None:
        self.rope = rope
        self.attends = len(parts) == 3
        sizes = list(accumulate(part.weight.shape[0] for part in parts))
        self._splits = sizes[:-1]
        self._whole = _empty(parts[0], sizes[-1])
        self._views: dict[str, Any] = {}
        for name in _PARAMETERS:
            if name in parts[0]:
                self._whole[name] = mx.concatenate([part[name] for part in parts])
                self._views[name] = mx.split(self._whole[name], self._splits)
                mx.eval(self._whole[name], self._views[name])
                for part, view in zip(parts, self._views[name], strict=True):
                    part[name] = view
        for place, part in enumerate(parts):
            part.joint, part.place = self, place

    def owns(self, part: Any) -> bool:
        """Whether a part has the weights that it was given, not others that came since."""
        return all(part[name] is views[part.place] for name, views in self._views.items())

    def part(self, step: Step, x: mx.array, place: int) -> mx.array | None:
        """What the projection at `place` makes of `x`; None where the first of them was given something else."""
        if place == 0:
            whole = self._whole(x)
            outputs: Any = mx.split(whole, self._splits, axis=-1)
            step.projected[self] = x, outputs
            if self.attends:
                step.whole = self, whole
        given, parts = step.projected.get(self, (None, []))
        return parts[place] if given is x else None


def project(original: Callable[..., mx.array], module: Any, x: mx.array) -> mx.array:
    """A `Patch.swap` call for the parts of a Joint: outside of our steps they are what they were."""
    step, joint = running(), module.joint
    output = joint.part(step, x, module.place) if step is not None and joint.owns(module) else None
    return original(module, x) if output is None else output


def join(module: nn.Module, patch: Patch) -> None:
    """Join all that can be joined in a model whose parameters are evaluated."""
    ropes: list[Rope] = []
    for holder in module.modules():
        for names in _GROUPS:
            parts = [holder.get(name) for name in names]
            if not _joined(parts):
                if not _alike(parts):
                    continue
                Joint(parts, _rope(holder.get("rope"), ropes))
            for part in parts:
                patch.swap(part, project)


def _joined(parts: list[Any]) -> bool:
    """Whether another Model has joined these already."""
    if not all(hasattr(part, "joint") for part in parts):
        return False
    return all(part.joint is parts[0].joint and part.joint.owns(part) for part in parts)


def rotations(model: Model) -> tuple[Rope | None, ...]:
    """The rotation of each layer that attends to its joint projection with queries and keys rotated and no more.

    Found by computing a few tokens far apart; what comes out otherwise has a norm, a scale or a bias in between.
    """
    found: list[tuple[Rope, list[mx.array]] | None] = [None] * len(model.layers)

    def attend(layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
        step = running()
        if step is not None and step.whole is not None and not model.recast[layer]:
            joint, whole = step.whole
            heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
            if joint.rope is not None and whole.shape[-1] == (heads + 2 * kv_heads) * dim and whole.dtype == k.dtype:
                expected = rotate(whole.squeeze(1), positions, joint.rope, heads, kv_heads, dim)
                found[layer] = joint.rope, [_same(*pair) for pair in zip((q, k, v), expected, strict=True)]
        return q

    positions = mx.array([1, 77, 300])
    mx.eval(model(mx.array([0, 1, 2]) % model.vocab_size, positions, attend))
    return tuple(entry[0] if entry is not None and all(map(bool, entry[1])) else None for entry in found)


def _same(found: mx.array, expected: mx.array) -> mx.array:
    """Whether two arrays differ by no more than how they were rounded."""
    found, expected, unit = found.astype(mx.float32), expected.astype(mx.float32), mx.finfo(found.dtype).eps
    return mx.abs(found - expected).max() <= unit * mx.abs(expected).max()


def _rope(module: Any, known: list[Rope]) -> Rope | None:
    """What a module does, as one of those `known` already where it is the same: layers share what follows from it."""
    if type(module) is nn.RoPE:
        rope = Rope(module.dims, module.traditional, base=module.base, scale=module.scale)
    elif type(module) is Llama3RoPE:
        rope = Rope(module.dims, module.traditional, freqs=module._freqs)
    else:
        return None
    same = (other for other in known if _values(other) == _values(rope))
    if (found := next(same, None)) is None:
        known.append(rope)
    return found or rope


def _values(rope: Rope) -> tuple[Any, ...]:
    freqs = None if rope.freqs is None else rope.freqs.tolist()
    return rope.dims, rope.traditional, rope.base, rope.scale, freqs


def _alike(parts: list[Any]) -> bool:
    """Whether these are plain projections of one kind and of inputs of one width."""
    first = parts[0]
    if type(first) not in (nn.Linear, nn.QuantizedLinear):
        return False
    return all(
        type(part) is type(first)
        and part.keys() == first.keys()
        and part.weight.dtype == first.weight.dtype
        and part.weight.shape[1] == first.weight.shape[1]
        and all(getattr(part, name, None) == getattr(first, name, None) for name in ("bits", "group_size", "mode"))
        for part in parts
    )


def _empty(part: Any, rows: int) -> Any:
    """A projection of `part`'s kind to `rows` outputs, its weights not made yet."""
    if isinstance(part, nn.QuantizedLinear):
        width = part.scales.shape[1] * part.group_size
        return nn.QuantizedLinear(width, rows, "bias" in part, part.group_size, part.bits, part.mode)
    return nn.Linear(part.weight.shape[1], rows, bias="bias" in part)
