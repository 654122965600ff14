"""SIGKILL at random moments of stores, loads and deletions."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvpersist.core.layout import parse_object_name

from .harness import TierDriver, content, key

ROUNDS = int(os.environ.get("KVP_CRASH_ROUNDS", "60"))
CAPACITY = 3_000_000
OBJECTS = 40
HERE = Path(__file__).resolve().parent

WRITER = f"""
import sys, random, threading
sys.path[:0] = sys.argv[3].split(":")
import importlib.util
spec = importlib.util.spec_from_file_location("harness", sys.argv[4])
harness = importlib.util.module_from_spec(spec)
sys.modules["harness"] = harness
spec.loader.exec_module(harness)
driver = harness.TierDriver(sys.argv[1], capacity_bytes={CAPACITY}, threads=2)
print("ready", flush=True)
def work(seed):
    chance = random.Random(seed)
    while True:
        number = chance.randrange({OBJECTS})
        key, size = harness.key(number), 50_000 + number * 5_001
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
for seed in range(3):
    threading.Thread(target=work, args=(seed + int(sys.argv[2]),), daemon=True).start()
sys.stdin.read()
"""


def test_a_kill_leaves_whole_objects_and_exact_accounting(tmp_path: Path) -> None:
    chance = random.Random(3)
    paths = ":".join(path for path in sys.path if path)
    temporaries = objects = 0
    for number in range(ROUNDS):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number), paths, str(HERE / "harness.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.12))
        child.send_signal(signal.SIGKILL)
        child.wait()
        temporaries += len(list(tmp_path.rglob("*.tmp.*")))
        on_disk = sum(path.lstat().st_size for path in tmp_path.glob("kvp-*/??/*"))
        assert on_disk <= CAPACITY

        driver = TierDriver(tmp_path, capacity_bytes=CAPACITY)
        assert not list(tmp_path.rglob("*.tmp.*")), "residue of a dead writer of this host goes at once"
        found = {path.name: path.stat().st_size for path in tmp_path.glob("kvp-*/??/*")}
        assert all(parse_object_name(name) for name in found)
        assert driver.tier.inventory.used_bytes() == sum(found.values())
        assert len(driver.tier.inventory) == len(found)
        for at in range(OBJECTS):
            size = 50_000 + at * 5_001
            loaded = driver.load(key(at), size)
            assert loaded is None or loaded == content(key(at), size)
            objects += loaded is not None
        counters = driver.counters()
        assert not [name for name in counters if name.startswith("damaged")], counters
        assert counters.get("loaded_objects", 0) == len(found)
        driver.close()
    assert objects > ROUNDS
    assert temporaries > 0 or ROUNDS < 50, "no kill met a store; the test shows nothing"
    assert len(list((tmp_path / ".writers").iterdir())) <= ROUNDS
