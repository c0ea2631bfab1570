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
_SETTINGS = ("bits", "group_size", "mode")


class Joint:
    """The projections that `holder` has under `names` as one, while some Model is open.

    They hold views of its weights from now on, so nothing is kept twice. Weights must not be changed in place while a
    Model is open. Other arrays or modules put in their place are used as they are, one by one, except by what was
    traced before.
    """

    def __init__(self, holder: nn.Module, names: tuple[str, ...], rope: Rope | None) -> None:
        self.rope = rope
        self.users = 0
        self._holder = holder
        self._parts: dict[str, Any] = {name: holder[name] for name in names}
        parts = self._parts
        self._in_order = True
        first: Any = parts[names[0]]
        sizes = list(accumulate(part.weight.shape[0] for part in parts.values()))
        self._splits = sizes[:-1]
        self.whole = _like(first)
        self._views: dict[str, Any] = {}
        for name in _parameters(first):
            self.whole[name] = mx.concatenate([part[name] for part in parts.values()])
            self._views[name] = mx.split(self.whole[name], self._splits)
            mx.eval(self.whole[name], self._views[name])
            for part, view in zip(parts.values(), self._views[name], strict=True):
                part[name] = view
        for place, part in enumerate(parts.values()):
            part.joint, part.place = self, place

    def intact(self) -> bool:
        """Whether the parts are where they were, with the weights that they were given, and are called in order."""
        parts: list[tuple[str, Any]] = list(self._parts.items())
        return self._in_order and all(
            all(part[parameter] is views[place] for parameter, views in self._views.items())
            and self._holder.get(name) is part
            for place, (name, part) in enumerate(parts)
        )

    def part(self, step: Step, x: mx.array, place: int) -> mx.array | None:
        """What the projection at `place` makes of `x`; None where the first of them was given something else."""
        if place == 0:
            step.projected.pop(self, None)
            if not self.intact():
                return None
            whole = self.whole(x)
            outputs: Any = mx.split(whole, self._splits, axis=-1)
            step.projected[self] = x, outputs, whole
        given, parts, whole = step.projected.get(self, (None, [], x))
        if given is not x:
            self._in_order = False
            return None
        if place == 2:
            step.whole = self, whole
        return parts[place]

    def leave(self) -> None:
        """A Model is closed. After the last the parts are what they were, and may be changed."""
        self.users -= 1
        for part in self._parts.values():
            if not self.users and getattr(part, "joint", None) is self:
                del part.joint, part.place


def project(original: Callable[..., mx.array], module: Any, x: mx.array) -> mx.array:
    """A `Patch.swap` call for the parts of a Joint: outside of our steps they are what they were."""
    step, joint = running(), getattr(module, "joint", None)
    output = joint.part(step, x, module.place) if step is not None and joint is not None else None
    return original(module, x) if output is None else output


def join(module: nn.Module, patch: Patch) -> None:
    """Join all that can be joined in a model whose parameters are evaluated."""
    ropes: list[Rope] = []
    for holder in module.modules():
        for names in _GROUPS:
            parts = [holder.get(name) for name in names]
            joint = getattr(parts[0], "joint", None)
            if joint is None or not joint.intact():
                if not _alike(parts):
                    continue
                joint = Joint(holder, names, _rope(holder.get("rope"), ropes))
            joint.users += 1
            patch.finally_do(joint.leave)
            for part in parts:
                patch.swap(part, project)


def rotations(model: Model) -> tuple[Rope | None, ...]:
    """The rotation of each layer that attends to its joint projection with queries and keys rotated and no more.

    Found by computing tokens at positions up to the longest context; what comes out otherwise has a norm, a scale or
    a bias in between.
    """
    found: list[tuple[Rope, list[mx.array]] | None] = [None] * len(model.layers)
    longest = model.max_context or 1 << 17
    positions = mx.array(sorted({longest - 1, *(2**i - 1 for i in range(1, 24) if 2**i <= longest)}))

    def attend(layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
        step, found[layer] = running(), None
        if step is not None and step.whole is not None and not model.recast[layer]:
            joint, whole = step.whole
            heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
            if joint.rope is not None and whole.shape[-1] == (heads + 2 * kv_heads) * dim and whole.dtype == k.dtype:
                expected = rotate(whole.squeeze(1), positions, joint.rope, heads, kv_heads, dim)
                found[layer] = joint.rope, [_same(*pair) for pair in zip((q, k, v), expected, strict=True)]
        return q

    model(mx.arange(positions.size) % model.vocab_size, positions, attend)
    # Nothing else is evaluated: a model that looks positions up in a table may have none for the longest.
    mx.eval([entry[1] for entry in found if entry is not None])
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
    """Whether these are plain projections of one kind and of inputs of one width, that nobody else has changed."""
    first = parts[0]
    return all(
        _kind(part) in (nn.Linear, nn.QuantizedLinear)
        and _kind(part) is _kind(first)
        and part.keys() == first.keys()
        and all(part[name].dtype == first[name].dtype for name in _parameters(first))
        and part.weight.shape[1] == first.weight.shape[1]
        and all(getattr(part, name, None) == getattr(first, name, None) for name in _SETTINGS)
        for part in parts
    )


def _kind(part: Any) -> type:
    """The class of a projection, below what `Patch.swap` has put over it for another Model."""
    kind = type(part)
    return kind.__bases__[0] if getattr(kind, "pagefork_call", None) is project else kind


def _parameters(part: Any) -> list[str]:
    return [name for name in ("weight", "scales", "biases", "bias") if name in part]


def _like(part: Any) -> Any:
    """A projection of `part`'s kind without weights. Its constructor would make some, and use up random numbers."""
    whole: Any = nn.Module()
    whole.__class__ = _kind(part)
    for name in _SETTINGS:
        if hasattr(part, name):
            setattr(whole, name, getattr(part, name))
    return whole
