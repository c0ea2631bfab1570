"""What all tests share: both event loops, and the scripts' modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import pagefork.runtime  # noqa: F401 - before any test imports mlx.core: MLX is set up as users have it

sys.path.append(str(Path(__file__).parent.parent / "scripts"))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param
