"""The self-test at load: what fails is replaced, loudly."""

from __future__ import annotations

import mlx.core as mx
import pytest
import structlog

from pagefork.kernels import Attention, KernelMismatch, Linear, Rotation, dispatch, prepare, verify

CASE = Attention(mx.float32, heads=4, kv_heads=2, head_dim=32, block_size=8, window=True, sinks=True, softcap=True)
ROTATION = Rotation(mx.float32, heads=4, kv_heads=2, head_dim=32, block_size=8, dims=16)


@pytest.fixture(autouse=True)
def forget_fallbacks():
    yield
    dispatch._fallbacks.clear()


@pytest.fixture
def broken(monkeypatch):
    right = dispatch.paged_attention
    monkeypatch.setattr(dispatch, "paged_attention", lambda *args, **options: right(*args, **options) * 1.01)


@pytest.fixture
def broken_rotation(monkeypatch):
    right = dispatch.rope_and_write

    def late(k_pool, v_pool, qkv, slots, positions, **options):
        return right(k_pool, v_pool, qkv, slots, positions + 1, **options)

    monkeypatch.setattr(dispatch, "rope_and_write", late)


@pytest.fixture
def broken_write(monkeypatch):
    def forgetful(k_pool, v_pool, k, v, slots, copies=None, order=None):
        return k_pool, v_pool, k_pool

    monkeypatch.setattr(dispatch, "write_kv", forgetful)


def test_a_sound_variant_keeps_its_back_end_and_reports_progress() -> None:
    seen = []
    assert prepare([CASE], strict=True, progress=lambda *step: seen.append(step)) == [verify.device().backend]
    assert [step[:2] for step in seen] == [(0, 2), (1, 2), (2, 2)]
    assert not dispatch._fallbacks


def test_a_mismatch_falls_back_and_names_variant_and_device(broken) -> None:
    with structlog.testing.capture_logs() as logs:
        assert prepare([CASE]) == ["reference"]
    assert dispatch._fallbacks == {CASE}
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert "heads=4/2" in entry["variant"]
    assert entry["device"] == verify.device().name


def test_a_write_that_does_not_land_is_noticed(broken_write) -> None:
    with structlog.testing.capture_logs() as logs:
        prepare([CASE])
    assert "write float32" in logs[0]["variant"]


def test_a_rotation_is_prepared_beside_the_attention_of_its_pools() -> None:
    seen = []
    chosen = prepare([CASE, ROTATION], strict=True, progress=lambda done, total, label: seen.append(label))
    assert chosen == [verify.device().backend] * 2
    assert [label.partition(" ")[0] for label in seen] == ["write", "decode", "rotate", ""]


def test_a_rotation_by_the_wrong_angle_is_noticed(broken_rotation) -> None:
    with structlog.testing.capture_logs() as logs:
        assert prepare([CASE, ROTATION]) == [verify.device().backend, "reference"]
    assert dispatch._fallbacks == {ROTATION}
    assert "rotate 16 and write float32 heads=4/2" in logs[0]["variant"]


def test_a_product_without_its_gate_is_noticed(monkeypatch) -> None:
    product = Linear(mx.float32, norm=64, glu=True)
    assert prepare([product], strict=True) == [verify.device().backend]
    right = dispatch.linear

    def open_gate(x, weights, glu, **options):
        return right(x, weights, **options)[:, : weights.shape[0] // 2]

    monkeypatch.setattr(dispatch, "linear", open_gate)
    with structlog.testing.capture_logs() as logs:
        assert prepare([CASE, product]) == [verify.device().backend, "reference"]
    assert dispatch._fallbacks == {product} and logs[0]["variant"] == "product float32 norm=64 glu"


def test_strict_raises(broken) -> None:
    with pytest.raises(KernelMismatch, match="heads=4/2"):
        prepare([CASE], strict=True)
    assert not dispatch._fallbacks
