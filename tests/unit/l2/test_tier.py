from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpersist.core import layout
from kvpersist.core.errors import UsageError
from kvpersist.core.frames import PAGE, FrameError, verify
from kvpersist.core.writers import Marker
from kvpersist_l2 import tier as tier_module

from .harness import MODEL, NAMESPACE, TierDriver, content, key

SIZE = 100_000
FRAME = PAGE + 25 * PAGE


def path_of(root: Path, number: object) -> Path:
    return root / layout.object_path(key(number))


def test_a_frame_at_rest_is_verified_by_the_standard_library(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    driver.store(key(1), content(key(1), SIZE))
    path = path_of(tmp_path, 1)
    with path.open("rb") as file:
        header = verify(file, path.stat().st_size, key=key(1))
    assert (header.raw_length, header.element_size, path.stat().st_size) == (SIZE, 2, FRAME)
    with path.open("rb") as file, pytest.raises(FrameError):
        verify(file, path.stat().st_size, key=key(2))
    driver.close()


def test_a_foreign_model_name_is_kept_beside_its_objects(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    foreign = key(1, "meta-llama/Llama-3.1-8B")
    driver.store(foreign, content(foreign, SIZE), foreign.scope)
    driver.store(key(2), content(key(2), SIZE))
    driver.close()
    model_file = tmp_path / layout.folder(foreign.scope) / layout.MODEL_FILE
    assert json.loads(model_file.read_text()) == {"model_name": foreign.scope}

    for lost in (False, True):
        if lost:  # the frames say it too
            model_file.unlink()
        driver = TierDriver(tmp_path)
        handles = {entry.handle for entry in driver.tier.inventory.newest_first()}
        assert handles == {(foreign, foreign.scope), (key(2), MODEL)}
        assert driver.load(foreign, SIZE) == content(foreign, SIZE)
        driver.close()


def test_files_of_no_known_kind_are_left_alone_and_counted(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    driver.store(key(1), content(key(1), SIZE))
    driver.close()
    note = path_of(tmp_path, 1).with_name("note.txt")
    note.write_text("mine")
    (tmp_path / "lost+found").mkdir()
    driver = TierDriver(tmp_path)
    assert driver.tier.status()["unknown"] == {"files": 1, "bytes": PAGE}
    assert driver.tier.inventory.used_bytes() == FRAME + PAGE
    assert note.read_text() == "mine"
    driver.close()


def test_files_of_another_adapter_count_against_the_cap(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    (root / "-SEP-models@0x01000100@0@00ff.data").write_bytes(bytes(3 * PAGE))
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "object.bin").write_bytes(bytes(PAGE))
    driver = TierDriver(root, capacity_bytes=6 * PAGE)
    assert driver.tier.status()["unknown"] == {"files": 2, "bytes": 4 * PAGE}
    assert driver.store(key(1), bytes(PAGE)).is_success
    assert not driver.store(key(2), bytes(PAGE)).is_success
    driver.tier.close()


def leave_temporary(root: Path, number: object, writer: str, age_s: float) -> Path:
    path = Path(layout.temporary_path(str(path_of(root, number)), writer))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(PAGE + 10))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_residue_goes_by_the_writer_guard_and_counts_while_it_stays(tmp_path: Path) -> None:
    from kvpersist.host.writers import own_marker

    own = own_marker()
    dead = Marker("d" * 32, own.pid, own.start_ticks + 1, own.pid_namespace, own.boot_id, own.host)
    live = Marker("e" * 32, own.pid, own.start_ticks, own.pid_namespace, own.boot_id, own.host)
    (tmp_path / ".writers").mkdir()
    for marker in (dead, live):
        (tmp_path / ".writers" / f"{marker.writer}.json").write_text(marker.render())
    (tmp_path / ".writers" / f"{'f' * 32}.json").write_text("?")
    old = 10_000.0
    kept = [
        leave_temporary(tmp_path, "live", live.writer, old),
        leave_temporary(tmp_path, "undecidable", "f" * 32, old),
        leave_temporary(tmp_path, "unregistered, young", "a" * 32, 800),
    ]
    swept = [
        leave_temporary(tmp_path, "dead", dead.writer, 0),
        leave_temporary(tmp_path, "unregistered, old", "b" * 32, 1000),
    ]
    driver = TierDriver(tmp_path)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in swept)
    assert driver.tier.inventory.used_bytes() == 3 * 2 * PAGE
    assert driver.tier.status()["temporary"] == {"files": 3, "bytes": 6 * PAGE}

    os.utime(kept[2], (time.time() - 1000,) * 2)
    kept[0].unlink()
    driver.tier.tick()
    assert [path.exists() for path in kept] == [False, True, False]
    assert driver.tier.inventory.used_bytes() == 2 * PAGE
    driver.close()


def test_what_a_killed_server_had_not_finished_writing_goes(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    driver.store(key(1), content(key(1), SIZE))
    driver.close()
    folder = tmp_path / NAMESPACE
    young, old = (tmp_path / ".writers" / f".{name}.json.x" for name in ("young", "old"))
    gone = [tmp_path / "..written.json.x", tmp_path / "..admission.new", folder / "..model.json.x", old]
    for path in (*gone, young):
        path.write_text("{")
    os.utime(old, (time.time() - 1000,) * 2)
    (folder / "00").mkdir(exist_ok=True)
    leave_temporary(tmp_path, "kept", "a" * 32, 0)
    driver = TierDriver(tmp_path)
    assert not [path for path in gone if path.exists()]
    assert young.exists()
    assert not (folder / "00").exists()
    assert driver.load(key(1), SIZE) == content(key(1), SIZE)
    driver.close()


def test_a_folder_goes_with_its_last_object(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    for _ in range(2):
        driver.store(key(1), content(key(1), SIZE))
        assert driver.delete(key(1))
        assert [path.name for path in (tmp_path / NAMESPACE).iterdir()] == [layout.MODEL_FILE]
    driver.close()


def test_damage_is_removed_where_the_quarantine_cannot_be_used(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    (tmp_path / layout.QUARANTINE_FOLDER).write_text("in the way")
    driver.store(key(1), content(key(1), SIZE))
    os.truncate(path_of(tmp_path, 1), PAGE)
    assert driver.load(key(1), SIZE) is None
    assert not path_of(tmp_path, 1).exists()
    assert driver.tier.inventory.used_bytes() == 0
    assert driver.store(key(1), content(key(1), SIZE)).is_success
    assert driver.load(key(1), SIZE) == content(key(1), SIZE)
    driver.close()


def test_damage_that_cannot_be_removed_counts_until_a_store_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "read-only file system")

    driver = TierDriver(tmp_path)
    driver.store(key(1), content(key(1), SIZE))
    with path_of(tmp_path, 1).open("r+b") as file:
        file.write(b"?")
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail)
        patched.setattr(os, "unlink", fail)
        assert driver.load(key(1), SIZE) is None
        assert driver.load(key(1), SIZE) is None
    assert driver.counters()["damaged_magic"] == 1
    assert driver.tier.inventory.used_bytes() == FRAME
    assert not driver.tier.lookup([key(1)])
    assert driver.store(key(1), content(key(1), SIZE)).is_success
    assert driver.load(key(1), SIZE) == content(key(1), SIZE)
    assert driver.tier.inventory.used_bytes() == FRAME
    driver.close()


def test_files_of_an_earlier_run_count_against_the_cap(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    for number in range(4):
        driver.store(key(number), content(key(number), SIZE))
    driver.close()
    driver = TierDriver(tmp_path, capacity_bytes=5 * FRAME)
    assert driver.store(key(4), bytes(SIZE)).is_success
    assert not driver.store(key(5), bytes(SIZE)).is_success
    assert driver.counters()["rejected_capacity"] == 1
    assert driver.delete(key(0))
    assert driver.store(key(5), bytes(SIZE)).is_success
    assert driver.tier.inventory.used_bytes() == 5 * FRAME
    driver.close()


def test_a_cap_lowered_below_what_is_there_refuses_stores_and_serves(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    for number in range(4):
        driver.store(key(number), content(key(number), SIZE))
    driver.close()
    driver = TierDriver(tmp_path, capacity_bytes=FRAME)
    assert not driver.store(key(9), bytes(SIZE)).is_success
    assert driver.load(key(3), SIZE) == content(key(3), SIZE)
    driver.close()


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "small"
    target.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small filesystem needs root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a small filesystem is not allowed here: {done.stderr.strip()}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def fill(driver: TierDriver, numbers: range) -> list[int]:
    return [number for number in numbers if driver.store(key(number), content(key(number), SIZE)).is_success]


def test_a_full_disk_refuses_serves_and_heals(small_filesystem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = TierDriver(small_filesystem)
    # Somebody else fills the disk between the look at its free bytes and the write.
    monkeypatch.setattr(tier_module, "_free_bytes", lambda root: 1 << 40)
    stored = fill(driver, range(20))
    assert 5 <= len(stored) < 20
    assert driver.counters()["rejected_disk_full"] == 20 - len(stored)
    assert not list(small_filesystem.rglob("*.tmp.*"))
    assert driver.tier.inventory.used_bytes() == len(stored) * FRAME
    driver.tier.tick()
    for number in stored:
        assert driver.load(key(number), SIZE) == content(key(number), SIZE)
    for number in stored[:3]:
        driver.delete(key(number))
    assert len(fill(driver, range(100, 103))) == 3
    driver.close()


def test_a_disk_that_is_full_at_start_serves(small_filesystem: Path) -> None:
    driver = TierDriver(small_filesystem)
    driver.store(key(1), content(key(1), SIZE))
    driver.close()
    filler = small_filesystem / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(PAGE)):
            pass
    driver = TierDriver(small_filesystem)
    assert driver.load(key(1), SIZE) == content(key(1), SIZE)
    assert not driver.store(key(2), bytes(SIZE)).is_success
    driver.tier.tick()
    filler.unlink()
    assert driver.store(key(2), bytes(SIZE)).is_success
    driver.close()


def test_the_free_space_floor_is_left(small_filesystem: Path) -> None:
    driver = TierDriver(small_filesystem, min_free_bytes=500_000)
    stored = fill(driver, range(20))
    assert driver.counters()["rejected_free_space"] == 20 - len(stored) > 0
    status = os.statvfs(small_filesystem)
    assert 500_000 <= status.f_bavail * status.f_frsize < 500_000 + 2 * FRAME
    driver.close()


def test_daily_figures_survive_a_restart(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    driver.store(key(1), bytes(SIZE))
    driver.close()
    driver = TierDriver(tmp_path)
    driver.store(key(2), bytes(SIZE))
    assert list(driver.tier.status()["written_bytes_by_day"].values()) == [2 * FRAME]
    driver.close()


def test_usage_is_told_by_scope(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    driver.store(key(1), bytes(SIZE))
    driver.store(key(1, "gpt2"), bytes(SIZE), "gpt2")
    driver.store(key(2, "gpt2"), bytes(SIZE), "gpt2")
    scopes = driver.tier.status()["scopes"]
    assert {name: (scope["bytes"], scope["files"]) for name, scope in scopes.items()} == {
        NAMESPACE: (FRAME, 1),
        "gpt2": (2 * FRAME, 2),
    }
    driver.delete(key(1))
    assert set(driver.tier.status()["scopes"]) == {"gpt2"}
    driver.close()


@pytest.mark.parametrize("fsync", ["none", "data", "full"])
def test_every_fsync_policy_stores(tmp_path: Path, fsync: str) -> None:
    driver = TierDriver(tmp_path, fsync=fsync)
    assert driver.store(key(1), content(key(1), SIZE)).is_success
    assert driver.load(key(1), SIZE) == content(key(1), SIZE)
    driver.close()


def test_a_key_that_no_frame_can_hold_is_refused(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path)
    long = key(1, "m" * 3000)
    assert not driver.store(long, bytes(SIZE), long.scope).is_success
    assert driver.counters() == {"rejected_key": 1}
    driver.close()


def test_a_root_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"preparing .*/file: file exists"):
        TierDriver(tmp_path / "file")


def test_a_failed_start_lets_the_next_one_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: str) -> None:
        raise OSError(5, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(tier_module, "scan", fail)
        with pytest.raises(OSError, match="input"):
            TierDriver(tmp_path)
    TierDriver(tmp_path).close()


def test_threads_that_store_load_delete_the_same_objects_agree_with_the_disk(tmp_path: Path) -> None:
    driver = TierDriver(tmp_path, capacity_bytes=12 * FRAME)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for count in range(150):
            number = (seed * 7 + count * 5) % 16
            action = (seed + count) % 4
            if action < 2:
                driver.store(key(number), content(key(number), SIZE))
            elif action == 2:
                loaded = driver.load(key(number), SIZE)
                if loaded is not None and loaded != content(key(number), SIZE):
                    wrong.append(number)
            else:
                driver.delete(key(number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [name for name in driver.counters() if name.startswith(("damaged", "store_errors", "delete_errors"))]
    found = {path.name: path.stat().st_size for path in tmp_path.rglob("*.bin")}
    assert driver.tier.inventory.used_bytes() == sum(found.values())
    assert len(driver.tier.inventory) == len(found)
    driver.close()
