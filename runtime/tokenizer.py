"""Text to token ids and back, whatever the tokenizer comes from."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import tokenizers

from pagefork.runtime.errors import InvalidRequest

Message = Mapping[str, str]


@runtime_checkable
class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def add(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD for a character that never became complete."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer. Special tokens never show in text."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a sequence."""

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        """Token ids of `text`. The start-of-sequence token, where the model has one, comes first unless the text
        starts with it already or is the `continuation` of a sequence."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens."""

    def stream(self) -> TextStream:
        """A fresh incremental decoder; its pieces joined are what `decode` gives for all its tokens."""

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the assistant's answer to `messages` (mappings with "role" and "content").

        Raises InvalidRequest when the model has no chat template or the template refuses the messages.
        """


def adapt(tokenizer: Any) -> Tokenizer:
    """A `Tokenizer` around a `tokenizers.Tokenizer`, a Hugging Face tokenizer or mlx-lm's wrapper of one.

    An object that is a `Tokenizer` already is returned as it is. Raises InvalidRequest for anything else.
    """
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return FastTokenizer(tokenizer)
    if isinstance(tokenizer, Tokenizer) and not hasattr(tokenizer, "convert_ids_to_tokens"):
        return tokenizer
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode"):
        return HFTokenizer(tokenizer)
    raise InvalidRequest(
        f"a {type(tokenizer).__name__} is no tokenizer; give a tokenizers.Tokenizer, a Hugging Face or mlx-lm "
        "tokenizer, or None and token ids"
    )


class FastTokenizer:
    """A `tokenizers.Tokenizer` with its end tokens and chat template."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        """`add_bos`: put `bos_token` in front of a text; False where the tokenizer's own post-processor does."""
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._bos_token, self._eos_token = bos_token, eos_token
        self._add_bos = add_bos and bos_token is not None
        self._chat_template = chat_template

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        starts = continuation or (self._bos_token is not None and text.startswith(self._bos_token))
        if self._add_bos and not starts:
            text = f"{self._bos_token}{text}"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not starts).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        return _stream(self._tokenizer, self.decode)

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; pass the prompt as text")
        return _render(self._chat_template, messages, self._bos_token or "", self._eos_token or "")


class HFTokenizer:
    """A tokenizer of `transformers`, or mlx-lm's wrapper of one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        ids = getattr(tokenizer, "eos_token_ids", None)
        if ids is None:
            ids = getattr(tokenizer, "eos_token_id", None)
        self._eos_ids = frozenset([ids] if isinstance(ids, int) else ids or [])

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        bos = getattr(self._tokenizer, "bos_token", None) or ""
        starts = continuation or (bool(bos) and text.startswith(bos))
        return list(self._tokenizer.encode(text, add_special_tokens=not starts))

    def decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            # Past `transformers`' clean-up of spaces, which would make the text depend on where it is cut.
            return str(self._backend.decode(list(ids), skip_special_tokens=True))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        return _stream(self._backend, self.decode)

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        if not getattr(self._tokenizer, "has_chat_template", getattr(self._tokenizer, "chat_template", None)):
            raise InvalidRequest("this model has no chat template; pass the prompt as text")
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        )


class ByteStream:
    """Exact for byte-level vocabularies: joins the tokens' bytes and decodes UTF-8 as far as it is complete."""

    def __init__(self, pieces: Callable[[int], bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._pieces(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any other vocabulary: decodes the last few tokens again and gives what is new.

    A token's text may depend on the one before it (leading spaces) and a character may be spread over several byte
    tokens, so the window goes back to the last token that is text in its own right.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids).rstrip("\ufffd")
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        alone = self._decode([token])
        if alone and "\ufffd" not in alone:
            self._ids = [token]
            self._shown = len(alone)
        return piece

    def flush(self) -> str:
        piece = self._decode(self._ids)[self._shown :]
        self._shown += len(piece)
        return piece


def _stream(tokenizer: tokenizers.Tokenizer | None, decode: Callable[[Sequence[int]], str]) -> TextStream:
    if tokenizer is not None and type(tokenizer.decoder).__name__ == "ByteLevel":
        return ByteStream(_byte_pieces(tokenizer))
    return WindowStream(decode)


def _byte_pieces(tokenizer: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """The bytes of each token of a byte-level vocabulary; none for special tokens and unknown ids."""
    added = tokenizer.get_added_tokens_decoder()
    table = _byte_of_character()

    def pieces(token: int) -> bytes:
        if token in added:
            return b"" if added[token].special else added[token].content.encode()
        name = tokenizer.id_to_token(token) or ""
        return b"".join(bytes([table[c]]) if c in table else c.encode() for c in name)

    return pieces


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write a byte as its Latin-1 character where that prints, else as U+0100, U+0101, ..."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _render(template: str, messages: Sequence[Message], bos_token: str, eos_token: str) -> str:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The template comes from a model file: it is untrusted, hence the sandbox.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
