"""The public face: Runtime and Sequence."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from pagefork.runtime.arguments import INT32, real, sampling_params, seconds, whole
from pagefork.runtime.beam import Beam, BeamSearchParams, OnStep, close_all, search
from pagefork.runtime.errors import ContextOverflow, InvalidRequest
from pagefork.runtime.forward import Blocks, build
from pagefork.runtime.generation import Generation
from pagefork.runtime.house import House
from pagefork.runtime.messages import Append, Close, Fork, Generate, ReadKV, SamplingParams, TopK, Truncate
from pagefork.runtime.models import DEFAULT_MODEL, Progress, Source, materialise
from pagefork.runtime.sequence import SequenceActor
from pagefork.runtime.stats import Stats, collect
from pagefork.runtime.supervisor import Options, running
from pagefork.runtime.tokenizer import Tokenizer

Prompt = str | Iterable[int]


class Sequence:
    """A live sequence: made by `Runtime.sequence` or `fork`, ended by `close`.

    Methods may be called from any task of the runtime's event loop; they take effect one after another. One that is
    cancelled or raises took no effect, unless its docstring says more. All raise SequenceClosed after `close`, and
    WorkerDied when the runtime has crashed.
    """

    def __init__(self, actor: SequenceActor, house: House) -> None:
        self._actor = actor
        self._house = house

    def __repr__(self) -> str:
        return f"Sequence({self._actor.owner}, {len(self)} tokens{', closed' if self.closed else ''})"

    def __len__(self) -> int:
        return self._actor.length

    @property
    def tokens(self) -> list[int]:
        """A copy of its token ids: the prompt, what was appended, and what was taken from generations."""
        return self._actor.tokens.tolist()

    @property
    def text(self) -> str:
        """`tokens` as text. InvalidRequest without a tokenizer."""
        return _tokenizer(self._house).decode(self.tokens)

    @property
    def closed(self) -> bool:
        return self._actor.dead is not None

    async def append(self, tokens: Prompt, *, deadline: float | None = None) -> None:
        """Add tokens, or a text that is encoded as a continuation, and reserve their blocks.

        Where layers have a window, those of as many as are held at once.

        A running generation ends first, at the last token taken, also where nothing is appended then. K and V of the
        new tokens are computed when they are first needed. deadline: seconds to wait for blocks; default `patience` of
        the runtime. Cancelled, either all or none were appended. Raises PoolExhausted, ContextOverflow, InvalidRequest,
        SequenceBusy.
        """
        deadline = seconds(deadline)
        await self._actor.ask(Append(encode(self._house, tokens, continuation=len(self) > 0), deadline))

    def generate(self, params: SamplingParams | None = None, *, deadline: float | None = None) -> Generation:
        """Sample tokens: `async for step in seq.generate(SamplingParams(max_tokens=64))` gives a Step for each.

        A token belongs to the sequence once it was taken. Leaving the loop early leaves the sequence ending at the
        last token taken. deadline: seconds that it waits for blocks each time there are none; default `patience` of
        the runtime. Until it ends, what came later waits for its blocks, even while nobody reads. While a task waits
        for the next token only `fork` and `close` may be called. Raises InvalidRequest here, and what
        `Generation.__anext__` says while iterating.
        """
        params = sampling_params(SamplingParams() if params is None else params)
        return Generation(self._actor, Generate(params, seconds(deadline)), self._house.facts.tokenizer)

    async def fork(self, count: int = 1) -> list[Sequence]:
        """`count` new sequences with this one's tokens. They share its blocks: no K and V are copied.

        What is pending of a prompt is computed first, once for all. The sequence itself stays usable; its running
        generation goes on, in a block of its own where it shares the last one now: with none to be had in time, its
        reader gets PoolExhausted. Cancelled, no child is left. Raises PoolExhausted, and InvalidRequest, also where
        `max_sequences` would be exceeded: a fork does not wait for that.
        """
        count = whole("count", count, 1, 65536)
        actors = await self._actor.ask(Fork(count), late=close_all)
        return [Sequence(actor, self._house) for actor in actors]

    async def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; a running generation ends first. Raises InvalidRequest, SequenceBusy."""
        await self._actor.ask(Truncate(whole("length", length, 0)))

    async def topk(self, k: int) -> list[tuple[int, float]]:
        """The `k` most likely next tokens with their log-probabilities, best first.

        A running generation ends first, at the last token taken. Cancelled, that stays so, and K and V computed so far
        stay. Raises PoolExhausted, InvalidRequest, SequenceBusy.
        """
        k = whole("k", k, 1, self._house.facts.vocab_size)
        top: list[tuple[int, float]] = await self._actor.ask(TopK(k))
        return top

    async def read_kv(self, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """A copy of the layer's K and V, float32 `[computed, kv_heads, head_dim]`; the last tokens may be pending.

        A running generation ends first. After a preemption there may be none: nothing is computed for this. Positions
        whose blocks were given back, since they are out of the layer's window, are NaN. Raises InvalidRequest,
        SequenceBusy.
        """
        layer = whole("layer", layer, 0, self._house.facts.layers - 1)
        k, v = await self._actor.ask(ReadKV(layer))
        return k, v

    async def close(self) -> None:
        """Return its blocks; a reader of its generation gets SequenceClosed. Idempotent. Cancelled, it still closes."""
        self._actor.post(Close())
        await self._actor.gone.wait()

    async def __aenter__(self) -> Sequence:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Runtime:
    """Many live sequences over one pool of KV blocks. Made by `async with Runtime.open(...) as rt`."""

    def __init__(self, house: House) -> None:
        self._house = house

    @staticmethod
    def open(
        model: Source = DEFAULT_MODEL,
        *,
        blocks: Blocks = 1024,
        block_size: int = 16,
        max_batch: int = 256,
        prefill_step_size: int = 512,
        lease: int = 64,
        patience: float = 30.0,
        prefix_cache: bool = True,
        max_queue: int | None = None,
        max_sequences: int | None = None,
        shutdown_timeout: float = 10.0,
        strict: bool = False,
        progress: Progress | None = None,
    ) -> AbstractAsyncContextManager[Runtime]:
        """Load a model and allocate its pool; on leaving, close every sequence and see that every block came back.

        model: "smollm2-135m" (fetched once), a path or repo id that mlx-lm takes, a .gguf file, or a
        (model, tokenizer) pair. blocks: how many blocks the pool has, of `block_size` tokens each, for all sequences
        together, and where only some layers have a window for each group of layers (docs/engine.md); "auto" takes what
        the device has room for beside the weights. max_batch: sequences computed in one
        step. prefill_step_size: prompt tokens a step takes beside its decodes. lease: tokens that a generation may run
        ahead of its reader.

        patience: seconds that an operation waits for blocks before PoolExhausted; meanwhile idle sequences, then later
        operations give up theirs and compute them again when they go on. prefix_cache: keep the blocks of past prompts
        for those that begin alike. max_queue: operations that may wait for blocks; more are refused at once.
        max_sequences: live sequences; `sequence` waits until one closes, `fork` is refused.

        shutdown_timeout: seconds that closing may take. strict: raise KernelMismatch where a GPU
        kernel fails its self-test, instead of warning and taking the slow path. `progress(stage, fraction)` is called
        from another thread while loading.

        Raises InvalidRequest here; UnsupportedModel, ModelUnavailable, InvalidRequest on entry; on exit WorkerDied
        where the allocator has crashed, and BlocksLeaked, which is a defect.
        """
        for name, value in (
            ("blocks", 1 if blocks == "auto" else blocks),
            ("block_size", block_size),
            ("max_batch", max_batch),
            ("prefill_step_size", prefill_step_size),
            ("lease", lease),
        ):
            whole(name, value, 1, INT32)
        if blocks != "auto":
            whole("blocks * block_size", blocks * block_size, 1, INT32)
        for name, limit, low in (("max_queue", max_queue, 0), ("max_sequences", max_sequences, 1)):
            if limit is not None:
                whole(name, limit, low)
        real("patience", patience, "seconds, not negative", 0)
        real("shutdown_timeout", shutdown_timeout, "seconds, not negative", 0)
        materialise(model)
        options = Options(
            build=partial(build, model, blocks, block_size, progress, strict),
            blocks=1 if blocks == "auto" else blocks,
            block_size=block_size,
            max_batch=max_batch,
            prefill_step_size=prefill_step_size,
            lease=lease,
            patience=patience,
            prefix_cache=prefix_cache,
            max_queue=max_queue,
            max_sequences=max_sequences,
            shutdown_timeout=shutdown_timeout,
        )
        return opened(options)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._house.facts.tokenizer

    async def sequence(self, prompt: Prompt = (), *, priority: float = 0.0, deadline: float | None = None) -> Sequence:
        """A new sequence that holds `prompt`, a text or token ids, maybe none.

        priority: where blocks are short, one level is worth 10 seconds of waiting. deadline: seconds that this waits
        where `max_sequences` live, and that its operations wait for blocks; default `patience` of the runtime.
        Cancelled, there is none. Raises PoolExhausted, ContextOverflow, InvalidRequest, RuntimeClosed, and
        DeadlineExceeded where no other sequence closed in time.
        """
        priority = real("priority", priority, "a finite number")
        return Sequence(await self._actor(prompt, priority, seconds(deadline)), self._house)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams | None = None, *, on_step: OnStep | None = None
    ) -> list[Beam]:
        """The best continuations of `prompt`, best first; see BeamSearchParams.

        `on_step(step, running, finished)` is called after each step, with `Past` hypotheses best first. Cancelled, all
        its blocks return. Raises PoolExhausted, ContextOverflow, InvalidRequest, RuntimeClosed, DeadlineExceeded.
        """
        house = self._house
        params = BeamSearchParams() if params is None else params
        params.validate()
        room = house.max_context - len(tokens := encode(house, prompt))
        if not tokens:
            raise InvalidRequest("the prompt of a beam search needs at least one token")
        if room < 1:
            raise ContextOverflow(f"{len(tokens)} tokens fill the context of {house.max_context}; shorten the prompt")
        stop = frozenset(params.stop_tokens) | (frozenset() if params.ignore_eos else house.facts.eos_ids)
        root = await self._actor(tokens)
        ranked = await search(root, params, stop, min(params.max_tokens, room), on_step)
        return [
            Beam(past.tokens(), self._text(past.tokens(), stop), score, past.logprob, finished)
            for score, past, finished in ranked
        ]

    def stats(self) -> Stats:
        """Where the runtime stands. Cheap; call it whenever you like."""
        return collect(self._house)

    async def _actor(self, prompt: Prompt, priority: float = 0.0, deadline: float | None = None) -> SequenceActor:
        house = self._house
        tokens = encode(house, prompt)
        await house.admit(house.patience if deadline is None else deadline)
        actor = SequenceActor(house, priority=priority, patience=deadline)
        house.spawn(actor)
        if tokens:
            try:
                await actor.ask(Append(tokens))
            except BaseException:
                actor.post(Close())
                raise
        return actor

    def _text(self, tokens: list[int], stop: frozenset[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in stop else tokens)


@asynccontextmanager
async def opened(options: Options) -> AsyncIterator[Runtime]:
    """A runtime over any engine; `Runtime.open` is the way in."""
    async with running(options) as house:
        yield Runtime(house)


def encode(house: House, prompt: Prompt, *, continuation: bool = False) -> list[int]:
    """Token ids of a prompt. Raises InvalidRequest for what is no text and no list of ids within the vocabulary."""
    if isinstance(prompt, str):
        return _tokenizer(house).encode(prompt, continuation=continuation)
    try:
        tokens = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InvalidRequest(f"give a text or token ids (integers), not {type(prompt).__name__}: {error}") from error
    for token in tokens:
        if not 0 <= token < house.facts.vocab_size:
            raise InvalidRequest(f"token {token} is outside the vocabulary of {house.facts.vocab_size}")
    return tokens


def _tokenizer(house: House) -> Tokenizer:
    tokenizer = house.facts.tokenizer
    if tokenizer is None:
        raise InvalidRequest("the model was given without a tokenizer; pass token ids instead of text")
    return tokenizer
