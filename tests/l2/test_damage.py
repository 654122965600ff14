"""Damaged files: never a wrong byte served, each counted, each healed by the next store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpersist.core import frames

from .harness import MIB, Driver, Memory, data_of, object_key
from .test_adapter import path_of

Make = Callable[..., Driver]
GOOD, BAD, OTHER = object_key("good"), object_key("bad"), object_key("other")


def flip(path: Path, position: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(frames.PAGE))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("else")


def replace_by_link(path: Path) -> None:
    kept = path.with_suffix(".kept")
    path.rename(kept)
    path.symlink_to(kept)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "flipped bit in the payload": ("checksum", lambda path: flip(path, frames.PAGE + 1000, 3)),
    "flipped bit in the last byte": ("checksum", lambda path: flip(path, -1, 7)),
    "flipped bit in the checksum": ("checksum", lambda path: flip(path, 24)),
    "flipped bit in the key": ("key", lambda path: flip(path, 52)),
    "flipped bit in the dtype": ("dtype", lambda path: flip(path, 46)),
    "flipped bit behind the key": ("checksum", lambda path: flip(path, 4000)),
    "flipped bit in the codec": ("header", lambda path: flip(path, 5, 6)),
    "another magic": ("magic", lambda path: flip(path, 0)),
    "another version": ("version", lambda path: flip(path, 4, 1)),
    "cut to a half": ("truncated", lambda path: truncate(path, path.stat().st_size // 2)),
    "cut by a byte": ("truncated", lambda path: truncate(path, path.stat().st_size - 1)),
    "cut to its header": ("truncated", lambda path: truncate(path, frames.PAGE)),
    "empty": ("truncated", lambda path: truncate(path, 0)),
    "a page longer": ("length", lengthen),
    "zeros": ("magic", lambda path: path.write_bytes(bytes(path.stat().st_size)) and None),
    "a folder": ("not_a_file", replace_by_folder),
    "a link": ("not_a_file", replace_by_link),
    "a fifo": ("not_a_file", replace_by_fifo),
}


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_is_a_miss_counted_and_healed(make: Make, memory: Memory, name: str, codec: str, restart: bool) -> None:
    kind, damage = DAMAGE[name]
    size = MIB + 100
    made, read = memory.filled(2, size), memory.objects(2, size)
    driver = make(codec=codec)
    driver.store([GOOD, BAD], made)
    damage(path_of(driver, BAD))
    if restart:
        driver = make(codec=codec)
    loaded = driver.load([GOOD, BAD], read)
    assert loaded == [0]
    assert data_of(read[0]) == data_of(made[0])
    counters = driver.counters()
    assert counters.get(f"damaged_{kind}", 0) + counters.get("damaged_at_start", 0) == 1, counters
    assert driver.lookup([GOOD, BAD]) == [0]
    assert driver.adapter.report_status()["quarantine"]["files"] == 1
    assert driver.adapter.get_usage().bytes_by_cache_salt == {"": path_of(driver, GOOD).stat().st_size}

    assert driver.store([GOOD, BAD], made).is_successful()
    assert driver.load([GOOD, BAD], read) == [0, 1]
    assert [data_of(one) for one in read] == [data_of(one) for one in made]
    status = make(codec=codec).adapter.report_status()
    assert (status["objects"], status["quarantine"]["files"]) == (2, 1)
    memory.free(made)
    memory.free(read)


def test_swapped_files_are_two_misses(make: Make, memory: Memory) -> None:
    made, read = memory.filled(2), memory.objects(2)
    driver = make()
    driver.store([BAD, OTHER], made)
    swap(path_of(driver, BAD), path_of(driver, OTHER))
    assert driver.load([BAD, OTHER], read) == []
    assert driver.counters()["damaged_key"] == 2
    assert driver.store([BAD, OTHER], made).is_successful()
    assert driver.load([BAD, OTHER], read) == [0, 1]
    memory.free(made)
    memory.free(read)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float8_e4m3fn, "length"), (torch.float32, "length"), (torch.float16, "dtype"), (torch.int16, "dtype")],
)
def test_an_object_of_another_dtype_under_the_same_key_is_a_miss(
    make: Make, memory: Memory, codec: str, dtype: Any, kind: str
) -> None:
    size = MIB * dtype.itemsize // 2
    made, target, again = memory.filled(1), memory.objects(1, size, dtype), memory.filled(1, size, 5, dtype)
    driver = make(codec=codec)
    driver.store([BAD], made)
    assert driver.load([BAD], target) == []
    assert driver.counters()[f"damaged_{kind}"] == 1
    assert driver.store([BAD], again).is_successful()
    assert driver.load([BAD], target) == [0]
    assert data_of(target[0]) == data_of(again[0])
    for objects in (made, target, again):
        memory.free(objects)


def test_the_quarantine_keeps_the_newest_within_its_limit(make: Make, memory: Memory) -> None:
    made, read = memory.filled(4), memory.objects(4)
    keys = [object_key(number) for number in range(4)]
    driver = make(quarantine_bytes=2 * (MIB + frames.PAGE))
    driver.store(keys, made)
    for key in keys:
        flip(path_of(driver, key), 5000)
        assert driver.load([key], read[:1]) == []
    status = driver.adapter.report_status()
    assert status["quarantine"] == {"files": 2, "bytes": 2 * (MIB + frames.PAGE)}
    assert driver.adapter.get_usage().total_bytes_used == 2 * (MIB + frames.PAGE)
    driver = make(quarantine_bytes=MIB)
    assert driver.adapter.report_status()["quarantine"] == {"files": 0, "bytes": 0}
    assert driver.adapter.get_usage().total_bytes_used == 0
    memory.free(made)
    memory.free(read)


def test_an_error_of_the_moment_damages_nothing(make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    made, read = memory.filled(1), memory.objects(1)
    driver = make()
    driver.store([GOOD], made)

    def fail(*_: object, **__: object) -> int:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("kvpersist_l2.frame_io.os.preadv", fail)
        assert driver.load([GOOD], read) == []
    assert driver.counters()["load_errors"] == 1
    assert driver.load([GOOD], read) == [0]
    memory.free(made)
    memory.free(read)


def test_a_disk_error_is_healed_like_damage(make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    made, read = memory.filled(1), memory.objects(1)
    driver = make()
    driver.store([BAD], made)

    def fail(*_: object, **__: object) -> int:
        raise OSError(5, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("kvpersist_l2.frame_io.os.preadv", fail)
        assert driver.load([BAD], read) == []
    assert driver.counters()["damaged_io"] == 1
    assert driver.store([BAD], made).is_successful()
    assert driver.load([BAD], read) == [0]
    memory.free(made)
    memory.free(read)


def test_a_filesystem_that_refuses_direct_io_is_read_and_written_all_the_same(
    make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    made, read = memory.filled(1, 9 * MIB), memory.objects(1, 9 * MIB)
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(22, "invalid argument")
        return real(descriptor, command, argument)

    monkeypatch.setattr("kvpersist_l2.frame_io.fcntl.fcntl", refuse)
    driver = make(io="direct")
    assert driver.store([GOOD], made).is_successful()
    assert driver.load([GOOD], read) == [0]
    assert data_of(read[0]) == data_of(made[0])
    memory.free(made)
    memory.free(read)


def test_a_filesystem_that_refuses_direct_transfers_is_read_and_written_all_the_same(
    make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    made, read = memory.filled(1, 9 * MIB), memory.objects(1, 9 * MIB)
    real_write, real_read = os.pwrite, os.preadv

    def is_direct(descriptor: int) -> bool:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def write(descriptor: int, *rest: Any) -> int:
        if is_direct(descriptor):
            raise OSError(22, "invalid argument")
        return real_write(descriptor, *rest)

    def read_into(descriptor: int, *rest: Any) -> int:
        if is_direct(descriptor):
            raise OSError(22, "invalid argument")
        return real_read(descriptor, *rest)

    monkeypatch.setattr("kvpersist_l2.frame_io.os.pwrite", write)
    monkeypatch.setattr("kvpersist_l2.frame_io.os.preadv", read_into)
    driver = make(io="direct")
    assert driver.store([GOOD], made).is_successful()
    assert driver.load([GOOD], read) == [0]
    assert data_of(read[0]) == data_of(made[0])
    memory.free(made)
    memory.free(read)
