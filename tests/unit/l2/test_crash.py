"""SIGKILL at random moments of stores, loads and deletions. KVP_CRASH_ROUNDS=200 makes it a long one."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

from kvpersist.core.layout import WRITERS_FOLDER, parse_object_name
from kvpersist.core.writers import DEAD_MARKER_S
from kvpersist.host.cache_scan import scan

from .harness import CAPACITY, OBJECTS, TierDriver, content, key, running, size_of

ROUNDS = int(os.environ.get("KVP_CRASH_ROUNDS", "60"))
# Beside objects. A marker that had not got its name yet is kept for a while, since a live writer's looks the same.
OWN = re.compile(
    r"(\.lock|\.written\.json|\.writers/([0-9a-f]{32}\.json|\.[0-9a-f]{32}\.json\.\w+)|kvp-[0-9a-f]{32}/\.model\.json)\Z"
)


def expect_only_what_belongs_there(root: Path) -> dict[str, int]:
    """Sizes of the objects by name; fails where there is any other file, or an empty folder."""
    objects = {}
    for path in root.rglob("*"):
        relative = str(path.relative_to(root))
        if path.is_dir():
            assert any(path.iterdir()) or path.name == WRITERS_FOLDER, relative
        elif parse_object_name(path.name):
            objects[path.name] = path.stat().st_size
        else:
            assert OWN.match(relative), relative
    return objects


def test_a_kill_leaves_whole_objects_exact_accounting_and_no_residue(tmp_path: Path) -> None:
    chance = random.Random(3)
    temporaries = objects = 0
    for number in range(ROUNDS):
        with running("work", tmp_path, str(number)) as (child, _):
            time.sleep(chance.uniform(0.0, 0.12))
            child.send_signal(signal.SIGKILL)
            child.wait()
        temporaries += len(list(tmp_path.rglob("*.tmp.*")))
        assert sum(path.lstat().st_size for path in tmp_path.glob("kvp-*/??/*")) <= CAPACITY

        driver = TierDriver(tmp_path, capacity_bytes=CAPACITY)
        # Residue of a dead writer of this host goes at once.
        found = expect_only_what_belongs_there(tmp_path)
        assert driver.tier.inventory.used_bytes() == sum(found.values())
        fresh = scan(str(tmp_path))
        assert len(driver.tier.inventory) == len(fresh.objects) == len(found)
        assert not [*fresh.temporary, *fresh.damaged, *fresh.unknown, *fresh.quarantined]
        for at in range(OBJECTS):
            size = size_of(at)
            loaded = driver.load(key(at), size)
            assert loaded is None or loaded == content(key(at), size)
            objects += loaded is not None
        counters = driver.counters()
        assert not [name for name in counters if name.startswith("damaged")], counters
        assert counters.get("loaded_objects", 0) == len(found)
        driver.close()
    assert objects > ROUNDS
    assert temporaries > 0 or ROUNDS < 50, "no kill met a store; the test shows nothing"

    for marker in (tmp_path / WRITERS_FOLDER).iterdir():
        os.utime(marker, (time.time() - 2 * DEAD_MARKER_S,) * 2)
    TierDriver(tmp_path).close()
    assert not list((tmp_path / WRITERS_FOLDER).iterdir()), "markers of the dead go after an hour"
