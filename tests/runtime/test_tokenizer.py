"""Text is the same whether it is decoded at once or token by token, and no half character ever shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pagefork.runtime.errors import InvalidRequest
from pagefork.runtime.tokenizer import FastTokenizer, HFTokenizer, Tokenizer, adapt

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if messages|length == 0 %}{{ raise_exception('no messages') }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """One token a byte, two merged pairs, two special tokens and an added one that is plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    for pair in ("he", "Ġw"):
        vocab[pair] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "w")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """A sentencepiece-like vocabulary: words with a leading-space mark, bytes for what it lacks."""
    words = ["<unk>", "▁he", "▁w", "llo", "orld", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], str]:
    """The pieces that came while tokens were added, and what the flush brought."""
    stream = tokenizer.stream()
    return [stream.add(token) for token in ids], stream.flush()


@pytest.fixture(params=["byte level", "byte fallback"])
def any_tokenizer(request: pytest.FixtureRequest) -> FastTokenizer:
    return FastTokenizer(byte_level() if request.param == "byte level" else byte_fallback())


BYTE_LEVEL = FastTokenizer(byte_level())
BYTE_FALLBACK = FastTokenizer(byte_fallback())
TEXTS = st.text(st.one_of(st.sampled_from("he wor"), st.characters(exclude_characters="▁", exclude_categories=["Cs"])))


@given(TEXTS)
def test_pieces_join_to_the_text_and_no_half_character_shows(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tokenizer.encode(text)
        pieces, rest = streamed(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
            assert rest == ""


@given(st.lists(st.integers(0, 255), max_size=12))
def test_any_bytes_stream_to_what_they_decode_to(ids: list[int]) -> None:
    pieces, rest = streamed(BYTE_LEVEL, ids)
    assert "".join(pieces) + rest == BYTE_LEVEL.decode(ids)


def test_a_character_of_four_bytes_shows_with_its_last_byte(any_tokenizer: FastTokenizer) -> None:
    ids = any_tokenizer.encode("🙂")
    pieces, rest = streamed(any_tokenizer, ids[-4:])
    assert pieces == ["", "", "", "🙂"]
    assert rest == ""


def test_what_never_becomes_a_character_shows_in_the_flush() -> None:
    ids = BYTE_LEVEL.encode("🙂")[:2]
    assert streamed(BYTE_LEVEL, ids) == (["", ""], "\ufffd")


def test_a_space_between_words_belongs_to_the_second(any_tokenizer: FastTokenizer) -> None:
    ids = any_tokenizer.encode("hello world")
    pieces, _ = streamed(any_tokenizer, ids)
    assert "".join(pieces) == "hello world"


def test_special_tokens_do_not_show_and_added_words_do() -> None:
    ids = BYTE_LEVEL.encode("<s>he<think>é</s>")
    assert len(ids) == 6
    assert BYTE_LEVEL.decode(ids) == "he<think>é"
    assert "".join(streamed(BYTE_LEVEL, ids)[0]) == "he<think>é"


def test_an_id_outside_the_vocabulary_is_no_text() -> None:
    assert streamed(BYTE_LEVEL, [100_000]) == ([""], "")


def test_the_start_token_comes_first_once_and_not_in_the_middle_of_a_sequence() -> None:
    tokenizer = FastTokenizer(byte_level(), bos_token="<s>", add_bos=True)
    plain = BYTE_LEVEL.encode("he")
    (start,) = BYTE_LEVEL.encode("<s>")
    assert tokenizer.encode("he") == [start, *plain]
    assert tokenizer.encode("<s>he") == [start, *plain]
    assert tokenizer.encode("he", continuation=True) == plain


def test_a_chat_template_is_rendered_or_refused_in_its_own_words() -> None:
    tokenizer = FastTokenizer(byte_level(), bos_token="<s>", chat_template=TEMPLATE)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>[user] hi\n[assistant]"
    with pytest.raises(InvalidRequest, match="no messages"):
        tokenizer.apply_chat_template([])
    with pytest.raises(InvalidRequest, match="no chat template"):
        BYTE_LEVEL.apply_chat_template([])


def test_a_chat_template_cannot_leave_its_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest):
        FastTokenizer(byte_level(), chat_template=escape).apply_chat_template([])


def test_hugging_face_tokenizers_and_mlx_lms_wrapper_are_adapted() -> None:
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    (end,) = BYTE_LEVEL.encode("</s>")
    for tokenizer in (fast, TokenizerWrapper(fast)):
        adapted = adapt(tokenizer)
        assert isinstance(adapted, HFTokenizer)
        assert adapted.eos_ids == {end}
        ids = adapted.encode("he wörld</s>")
        assert ids == BYTE_LEVEL.encode("he wörld</s>")
        assert adapted.decode(ids) == "he wörld"
        pieces, rest = streamed(adapted, ids)
        assert ("".join(pieces), rest) == ("he wörld", "")
        assert adapted.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>[user] hi\n[assistant]"


def test_adapting_keeps_a_tokenizer_of_the_protocol_and_refuses_anything_else() -> None:
    assert adapt(BYTE_LEVEL) is BYTE_LEVEL
    assert isinstance(adapt(byte_level()), FastTokenizer)
    with pytest.raises(InvalidRequest, match="int is no tokenizer"):
        adapt(3)
