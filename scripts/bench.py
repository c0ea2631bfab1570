"""Benchmarks, each a command of its own; `--json` prints one JSON object instead of text."""

from __future__ import annotations

import argparse

import pagefork.runtime as _runtime  # noqa: F401  it sets up MLX's environment before MLX starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    import bench_beam
    import bench_control
    import bench_decode
    import bench_kernels
    import bench_load
    import bench_products

    for module in (bench_kernels, bench_products, bench_control, bench_decode, bench_load, bench_beam):
        module.add_command(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
