"""Which BLAS is loaded for MLX's CPU build; each case in an interpreter of its own, since it is loaded once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagefork.runtime import blas

pytestmark = pytest.mark.skipif(blas.LIBRARY is None, reason="no BLAS was loaded here")


def loaded(**environment: str) -> str:
    code = "from pagefork.runtime import blas; import os; print(blas.LIBRARY, os.environ.get('BLIS_NUM_THREADS'))"
    known = {name: value for name, value in os.environ.items() if "THREADS" not in name and name != "PAGEFORK_BLAS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=known | environment, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()[-1]


def test_the_one_that_is_asked_for() -> None:
    assert loaded(PAGEFORK_BLAS=blas.LIBRARY or "").split()[0] == blas.LIBRARY
    assert loaded(PAGEFORK_BLAS="libno-such-blas.so.7").split()[0] == "None"
    assert loaded(PAGEFORK_BLAS="0").split()[0] == "None"


@pytest.mark.skipif("blis" not in (blas.LIBRARY or ""), reason="OpenBLAS takes all by itself")
def test_blis_has_all_processors_unless_the_user_says_how_many_threads() -> None:
    assert loaded().split()[1] == str(len(os.sched_getaffinity(0)))
    assert loaded(OMP_NUM_THREADS="1").split()[1] == "None"
    assert loaded(BLIS_NUM_THREADS="3").split()[1] == "3"
