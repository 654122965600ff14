"""A process with a tier or a temporary file of its own, for tests that kill it or put it into another namespace.

Usage: process.py writer|judge|store|work|reuse ROOT [SEED]
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from kvpersist.core import layout
from kvpersist.host.writers import Registration

# The tests are no package that a program could import.
spec = importlib.util.spec_from_file_location("harness", Path(__file__).with_name("harness.py"))
harness: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
sys.modules["harness"] = harness
spec.loader.exec_module(harness)  # type: ignore[union-attr]


def writer(root: Path) -> None:
    """Has a temporary file open, as in the middle of a store, until its stdin ends."""
    registration = Registration(str(root))
    registration.ensure()
    temporary = layout.temporary_path(str(root / layout.object_path(harness.key(os.urandom(8)))), registration.writer)
    os.makedirs(os.path.dirname(temporary), exist_ok=True)
    with open(temporary, "wb") as file:
        file.write(b"half")
        file.flush()
        print(json.dumps({"pid": os.getpid(), "temporary": temporary}), flush=True)
        sys.stdin.read()


def judge(root: Path) -> None:
    """Starts a tier, which sweeps, and tells what is left."""
    driver = harness.TierDriver(root)
    left = [str(path) for path in root.rglob("*.tmp.*")]
    print(json.dumps({"pid": os.getpid(), "left": left, "counters": driver.counters()}), flush=True)
    sys.stdin.read()
    driver.close()


def store(root: Path) -> None:
    """Stores large objects for ever."""
    driver = harness.TierDriver(root)
    data = bytes(64 << 20)
    print("{}", flush=True)
    while True:
        driver.store(harness.key(1), data)
        driver.delete(harness.key(1))


def work(root: Path) -> None:
    """Stores, loads and deletes in three threads."""
    driver = harness.TierDriver(root, capacity_bytes=harness.CAPACITY, threads=2)
    print("{}", flush=True)

    def repeat(seed: str) -> None:
        chance = random.Random(seed)
        while True:
            number = chance.randrange(harness.OBJECTS)
            key, size = harness.key(number), harness.size_of(number)
            if chance.random() < 0.6:
                driver.store(key, harness.content(key, size))
            elif chance.random() < 0.5:
                driver.tier.lookup([key])
                driver.load(key, size)
                driver.tier.unlock([key])
            else:
                driver.delete(key)
            if chance.random() < 0.05:
                driver.tier.tick()

    for number in range(3):
        threading.Thread(target=repeat, args=(f"{sys.argv[3]} {number}",), daemon=True).start()
    sys.stdin.read()


def reuse(root: Path) -> None:
    """Gives the pid of a killed writer to another process, with a live writer beside it, and judges them."""

    def start() -> tuple[subprocess.Popen[str], dict[str, Any]]:
        argv = [sys.executable, __file__, "writer", str(root)]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        return child, json.loads(child.stdout.readline())

    (dead, of_dead), (live, of_live) = start(), start()
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(dead.pid - 1))
    heir = subprocess.Popen(["sleep", "1000"])
    assert heir.pid == dead.pid
    driver = harness.TierDriver(root)
    print(json.dumps({kind: os.path.exists(of["temporary"]) for kind, of in (("dead", of_dead), ("live", of_live))}))
    driver.close()
    heir.kill()
    live.kill()


if __name__ == "__main__":
    program = {"writer": writer, "judge": judge, "store": store, "work": work, "reuse": reuse}[sys.argv[1]]
    program(Path(sys.argv[2]))
