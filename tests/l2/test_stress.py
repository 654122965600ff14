"""Everything at once: stores, loads, eviction and damage from outside. KVP_STRESS_S=600 makes it a long one.

Threads are switched a thousand times as often as usual, which brings out what a lock does not protect.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpersist.core import frames
from lmcache.v1.distributed.eviction import L2EvictionPolicy
from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy

from .harness import Driver, Memory, content, data_of, object_key

SECONDS = float(os.environ.get("KVP_STRESS_S", "4"))
COUNT = 60
SIZE = 300_002
SWITCH_S = 5e-6
MOST_GROWTH = 24 << 20
CAPACITY = 40 * frames.file_length(SIZE)


def wait_for(query: Callable[[], Any]) -> Any:
    while (result := query()) is None:
        time.sleep(0.0005)
    return result


def damage(path: Path, others: list[Path], chance: random.Random) -> None:
    kind = chance.random()
    size = path.stat().st_size
    if kind < 0.5:
        with path.open("r+b") as file:
            file.seek(chance.randrange(size))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    elif kind < 0.7:
        os.truncate(path, chance.randrange(size))
    elif kind < 0.85:
        path.unlink()
    else:
        path.rename(chance.choice(others))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stress:
    """One adapter, and the steps that threads repeat on it."""

    def __init__(self, driver: Driver, memory: Memory) -> None:
        self.adapter = driver.adapter
        self.policy = LRUEvictionPolicy()
        self.adapter.register_listener(L2EvictionPolicy(self.policy))
        self.root = Path(self.adapter.report_status()["root"])
        self.keys = [object_key(number) for number in range(COUNT)]
        self.expected = [content(number, SIZE) for number in range(COUNT)]
        self.sources = memory.filled(COUNT, SIZE)
        self.targets = memory.objects(COUNT, SIZE)
        self.results: dict[int, Any] = {}
        self.wrong: list[int] = []
        self.loaded = 0
        self.worst_bytes = 0
        self.resident: list[int] = []
        self.errors: list[BaseException] = []

    def store(self, chance: random.Random) -> None:
        chosen = chance.sample(range(COUNT), chance.randint(1, 6))
        task = self.adapter.submit_store_task([self.keys[one] for one in chosen], [self.sources[one] for one in chosen])
        wait_for(lambda: self._finished(task))

    def load(self, chance: random.Random, first: int) -> None:
        """Loads into six buffers of its own."""
        into = self.targets[first : first + 6]
        chosen = chance.sample(range(COUNT), 6)
        task = self.adapter.submit_lookup_and_lock_task([self.keys[one] for one in chosen], {})
        hits = [chosen[hit] for hit in self.adapter.query_lookup_and_lock_result(task).get_indices_list()]
        task = self.adapter.submit_load_task([self.keys[hit] for hit in hits], into[: len(hits)])
        for position in wait_for(lambda: self.adapter.query_load_result(task)).get_indices_list():
            self.loaded += 1
            if data_of(into[position]) != self.expected[hits[position]]:
                self.wrong.append(hits[position])
        self.adapter.submit_unlock([self.keys[hit] for hit in hits])

    def evict(self, _: random.Random) -> None:
        time.sleep(0.02)
        usage = self.adapter.get_usage()
        self.worst_bytes = max(self.worst_bytes, usage.total_bytes_used)
        if usage.usage_fraction > 0.8:
            self.adapter.delete(self.policy.get_eviction_candidates(5))
        self.resident.append(resident_bytes())

    def harm(self, chance: random.Random) -> None:
        time.sleep(0.03)
        with contextlib.suppress(OSError):  # it went while we looked
            found = list(self.root.glob("kvp-*/??/*.bin"))
            if found:
                damage(chance.choice(found), found, chance)

    def run(self) -> None:
        end = time.monotonic() + SECONDS

        def repeat(step: Callable[[random.Random], None], seed: int) -> None:
            chance = random.Random(seed)
            try:
                while time.monotonic() < end and not self.errors:
                    step(chance)
            except BaseException as error:  # noqa: BLE001 - of any thread
                self.errors.append(error)

        loads = [functools.partial(self.load, first=first) for first in (0, 6, 12)]
        steps = [self.store, self.store, self.store, self.evict, self.harm, *loads]
        threads = [threading.Thread(target=repeat, args=(step, seed)) for seed, step in enumerate(steps)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)

    def growth(self) -> int:
        """By how many bytes the process was larger in the second half than ever in the first."""
        half = len(self.resident) // 2
        return max(self.resident[half:]) - max(self.resident[:half])

    def _finished(self, task: int) -> Any:
        self.results.update(self.adapter.pop_completed_store_tasks())
        return self.results.pop(task, None)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_nothing_wrong_is_served_and_everything_agrees_in_the_end(make: Any, memory: Memory, codec: str) -> None:
    driver: Driver = make(capacity_bytes=CAPACITY, codec=codec)
    stress = Stress(driver, memory)
    stress.run()
    assert not stress.errors
    assert not stress.wrong
    assert stress.growth() < MOST_GROWTH
    counters = driver.counters()
    assert not [name for name in counters if name.endswith("_errors")], counters
    print(f"{stress.loaded} loads, {counters}, growth {stress.growth() >> 10} KiB of {stress.resident[-1] >> 20} MiB")
    assert stress.loaded
    assert stress.worst_bytes <= CAPACITY
    driver.load(stress.keys, stress.targets)  # what was harmed last is found
    adapter = stress.adapter
    listed = adapter.list_l2_keys(page_size=COUNT * 2).entries
    assert set(stress.policy.get_eviction_candidates(COUNT * 2)) == {entry.key.to_object_key() for entry in listed}
    on_disk = sum(path.stat().st_size for path in stress.root.glob("kvp-*/??/*.bin"))
    assert adapter.get_usage().total_bytes_used == on_disk + adapter.report_status()["quarantine"]["bytes"]
    assert adapter.report_status()["pinned_objects"] == 0
    memory.free(stress.sources)
    memory.free(stress.targets)
