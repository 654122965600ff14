"""Eight writers that store in bursts, through LMCache's own controllers, until they are stopped.

Usage: writers.py ROOT CAPACITY SEED
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import time
from pathlib import Path

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc

# The tests are no package that a program could import.
spec = importlib.util.spec_from_file_location("harness", Path(__file__).with_name("harness.py"))
harness = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
sys.modules["harness"] = harness
spec.loader.exec_module(harness)  # type: ignore[union-attr]

WRITERS = 8
SIZES = (64 << 10, 192 << 10, 320 << 10)


def write(storage: object, chance: random.Random) -> None:
    """One burst."""
    size = chance.choice(SIZES)
    layout = MemoryLayoutDesc([torch.Size([size // 2])], [torch.bfloat16])
    keys = [harness.object_key(chance.random()) for _ in range(chance.randint(1, 16))]
    reserved = storage.reserve_write(keys, layout)  # type: ignore[attr-defined]
    storage.finish_write(list(reserved))  # type: ignore[attr-defined]
    time.sleep(chance.uniform(0, 0.1))


def main() -> None:
    root, capacity, seed = sys.argv[1:]
    storage = harness.storage_manager(harness.plugin(Path(root), capacity_bytes=int(capacity)))
    stop = threading.Event()

    def repeat(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        while not stop.is_set():
            write(storage, chance)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(storage.report_status()["l2_adapters"][0]["counters"], flush=True)
    storage.close()


main()
