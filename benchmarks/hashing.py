"""Hashing of a model folder against ``sha256sum`` over the same bytes in the same run.

Many shards and one shard, with the page cache cold and warm, in rounds that alternate between the contenders. Each
contender is a process of its own, from its start to its end. How much it read from the disk and its peak memory are
the kernel's counts. ``openssl dgst`` runs too where it is installed: sha256sum is often built without the
processor's SHA instructions, and a peer that has them says more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpersist.host.files import drop_page_cache
from kvpersist.host.hashing import HashCache, sha256_files

OURS, THEIRS = "kvpersist", "sha256sum"
LEAST_RATIO = {"many shards": 1.8, "one shard": 1.0}
LONGEST_CACHED_S = 1.0
_WRITE = 16_000_000


@dataclass(frozen=True)
class Run:
    """One process over all files of a set.

    Attributes:
        seconds: from its start to its end.
        disk_bytes: what the kernel read from the disk for it.
        peak_bytes: largest resident memory.
    """

    seconds: float
    disk_bytes: int
    peak_bytes: int


def main() -> int:
    """Prints one table a set; 1 when a target is missed, 2 when two programs disagree about a digest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of each set (default: %(default)s)")
    parser.add_argument("--set", choices=LEAST_RATIO, action="append", help="only this set")
    parser.add_argument("--shards", type=int, default=200, help="files of the set of many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: %(default)s)")
    parser.add_argument("--folder", default=".", help="where the files are made and removed (default: here)")
    parser.add_argument("--hash", nargs=argparse.REMAINDER, metavar="CACHE FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hash:
        return _hash(arguments.hash[0], arguments.hash[1:])
    cores = len(os.sched_getaffinity(0))
    print(f"{arguments.gigabytes:g} GB a set, {cores} cores, medians of {arguments.rounds} rounds (fastest to slowest)")
    missed: list[str] = []
    for name in arguments.set or LEAST_RATIO:
        shards = 1 if name == "one shard" else arguments.shards
        folder = Path(tempfile.mkdtemp(prefix="hashing-", dir=arguments.folder))
        try:
            files = make_files(folder, int(arguments.gigabytes * 1e9), shards)
            print(f"\n{name}: {shards} × {files[0].stat().st_size / 1e6:.0f} MB")
            missed += compare(name, files, arguments.rounds)
            if shards > 1:
                missed += cached(files, folder / "cache.jsonl")
        finally:
            shutil.rmtree(folder)
    print("\n" + ("; ".join(missed) or "Every target is met."))
    return 1 if missed else 0


def make_files(folder: Path, size: int, count: int) -> list[Path]:
    """Files of random bytes, on the disk when this returns."""
    paths = [folder / f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    noise = os.urandom(_WRITE)
    for number, path in enumerate(paths):
        left = size // count
        with path.open("wb") as file:
            file.write(number.to_bytes(8, "big"))  # no two alike
            left -= 8
            while left > 0:
                left -= file.write(noise[:left])
            file.flush()
            os.fsync(file.fileno())
    return paths


def compare(name: str, files: Sequence[Path], rounds: int) -> list[str]:
    """Prints the table of one set. Returns the targets that were missed."""
    missed = []
    size = sum(path.stat().st_size for path in files)
    print(f"{'page cache':12}{'program':16}{'seconds':>24}{'GB/s':>8}{'× sha256sum':>13}{'disk GB':>10}{'peak MB':>9}")
    for warm in (False, True):
        runs = measure(files, warm, rounds)
        medians = {program: statistics.median(run.seconds for run in each) for program, each in runs.items()}
        for program, each in runs.items():
            times = [run.seconds for run in each]
            seconds = f"{medians[program]:.2f} ({min(times):.2f} to {max(times):.2f})"
            disk = statistics.median(run.disk_bytes for run in each) / 1e9
            peak = max(run.peak_bytes for run in each) / 1e6
            print(
                f"{'warm' if warm else 'cold':12}{program:16}{seconds:>24}{size / 1e9 / medians[program]:8.2f}"
                f"{medians[THEIRS] / medians[program]:13.2f}{disk:10.1f}{peak:9.0f}"
            )
        ratio = medians[THEIRS] / medians[OURS]
        if warm and ratio < LEAST_RATIO[name]:
            missed.append(f"{name}: {ratio:.2f} × sha256sum, the target is {LEAST_RATIO[name]}")
    return missed


def measure(files: Sequence[Path], warm: bool, rounds: int) -> dict[str, list[Run]]:
    """Runs of each program, in turns.

    Raises:
        SystemExit: when a program fails or two disagree about a digest.
    """
    names = [str(path) for path in files]
    programs = {OURS: [sys.executable, __file__, "--hash", "", *names], THEIRS: ["sha256sum", *names]}
    if shutil.which("openssl"):
        programs["openssl dgst"] = ["openssl", "dgst", "-sha256", "-r", *names]
    runs: dict[str, list[Run]] = {program: [] for program in programs}
    digests: set[str] = set()
    for _ in range(rounds):
        for program, argv in programs.items():
            if warm:
                for path in files:
                    with path.open("rb", buffering=0) as file:
                        while file.read(_WRITE):
                            pass
            else:
                drop_page_cache(str(files[0].parent))
            run, output = timed(argv)
            runs[program].append(run)
            digests.add(" ".join(line.split()[0] for line in output.splitlines()))
    if len(digests) != 1:
        print("ERROR: the programs disagree about a digest", file=sys.stderr)
        sys.exit(2)
    return runs


def timed(argv: Sequence[str]) -> tuple[Run, str]:
    """Runs a program to its end.

    Raises:
        SystemExit: when it fails.
    """
    began = time.perf_counter()
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    peak_kb, ended = 0, threading.Event()

    def watch() -> None:  # ru_maxrss would include this process, of which the child was a copy
        nonlocal peak_kb
        while not ended.wait(0.01):
            with contextlib.suppress(OSError):
                peak = re.search(r"VmHWM:\s+([0-9]+)", Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8"))
                peak_kb = max(peak_kb, int(peak[1]) if peak else 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    text = child.stdout.read() if child.stdout else ""
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"ERROR: {argv[0]} ended with {child.returncode}")
    return Run(seconds, usage.ru_inblock * 512, peak_kb * 1024), text


def cached(files: Sequence[Path], store: Path) -> list[str]:
    """Hashes once so that all is remembered, then measures a second process. Returns the target if it was missed."""
    argv = [sys.executable, __file__, "--hash", str(store), *map(str, files)]
    timed(argv)
    run, _ = timed(argv)
    print(f"second run over {len(files)} remembered shards: {run.seconds:.3f} s, {run.peak_bytes / 1e6:.0f} MB")
    return [f"second run: {run.seconds:.2f} s, the target is 1 s"] if run.seconds > LONGEST_CACHED_S else []


def _hash(store: str, paths: Sequence[str]) -> int:
    for digest in sha256_files(paths, HashCache(store or None, keep=True)).values():
        print(digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
