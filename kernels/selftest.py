"""`python -m pagefork.kernels.selftest`: the kernels against the reference path on this machine, as a table."""

from __future__ import annotations

import sys

from pagefork.kernels.device import device
from pagefork.kernels.verify import describe, selftest


def main() -> int:
    """Print one line a variant; returns the number of failures, at most 1."""
    found = device()
    print(f"{found.name}: {found.backend} back end, {found.cores} cores")
    results = selftest()
    for result in results:
        verdict = "ok" if result.passed else "FAILED"
        print(f"{verdict:7}{result.error:9.1e}  {describe(result.variant)}  {result.failure}".rstrip())
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
