"""Benchmarks. `bench.py kernels` times the attention kernels; `--json` prints one JSON object instead of a table."""

from __future__ import annotations

import argparse
import os

# MLX ends a CUDA graph as soon as its kernels name so many megabytes of arrays, and a pool alone is larger: then each
# kernel is a graph of its own, whose launch costs more than the kernel's slack. Read when MLX starts.
os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "10000000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    import bench_kernels

    bench_kernels.add_command(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
