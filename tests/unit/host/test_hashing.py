"""host.hashing: digests, and when a remembered one may be used."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from kvpersist.core.errors import UsageError
from kvpersist.host import hashing
from kvpersist.host.hashing import HashCache, sha256_files

PIECE = 4 * 1024 * 1024


class CountedBytes:
    """A progress receiver that checks what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths whose bytes were really read."""
    read: list[str] = []
    real = hashing._sha256

    def watched(path: str, advance: object) -> str:
        read.append(os.path.basename(path))
        return real(path, advance)  # type: ignore[arg-type]

    monkeypatch.setattr(hashing, "_sha256", watched)
    return read


def tick() -> None:
    """Lets the clock of file times, which moves in steps of some milliseconds, go on."""
    time.sleep(0.03)


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
def test_digest_is_that_of_hashlib_around_the_size_of_a_piece(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "shard"
    path.write_bytes(content)
    assert sha256_files([str(path)], HashCache(None)) == {str(path): hashlib.sha256(content).hexdigest()}


def test_many_files_each_get_their_own_digest(tmp_path: Path) -> None:
    contents = {str(tmp_path / f"shard{number}"): os.urandom(number * 1000) for number in range(20)}
    for path, content in contents.items():
        Path(path).write_bytes(content)
    expected = {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
    assert sha256_files(list(contents), HashCache(None)) == expected


def test_progress_sums_up_to_the_total_with_and_without_remembered_files(tmp_path: Path) -> None:
    cache = HashCache(str(tmp_path / "cache.json"))
    paths = []
    for number in range(3):
        paths.append(str(tmp_path / f"shard{number}"))
        Path(paths[-1]).write_bytes(os.urandom(PIECE + number))
    for _ in range(2):
        progress = CountedBytes()
        sha256_files(paths, cache, progress)
        assert {total for _, total in progress.calls} == {3 * PIECE + 3}
        assert progress.calls[-1][0] == 3 * PIECE + 3
        assert [done for done, _ in progress.calls] == sorted(done for done, _ in progress.calls)


def test_an_unchanged_file_is_not_read_again_also_not_in_another_run(tmp_path: Path, hashed: list[str]) -> None:
    path, store = tmp_path / "shard", str(tmp_path / "state" / "cache.json")
    path.write_bytes(b"weights")
    cache = HashCache(store)
    first = sha256_files([str(path)], cache)
    cache.save()
    assert sha256_files([str(path)], HashCache(store)) == first
    assert hashed == ["shard"]


@pytest.mark.parametrize("change", ["size", "mtime", "ctime", "inode"])
def test_a_remembered_digest_needs_size_times_and_inode_to_be_the_same(
    tmp_path: Path, hashed: list[str], change: str
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"weights")
    cache = HashCache(None)
    sha256_files([str(path)], cache)
    stat = path.stat()
    tick()
    if change == "size":
        with path.open("ab") as file:
            file.write(b"!")
    elif change == "mtime":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif change == "ctime":
        path.chmod(0o600 if stat.st_mode & 0o077 else 0o640)
    else:
        copy = tmp_path / "copy"
        copy.write_bytes(b"weights")
        os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        copy.rename(path)
    assert sha256_files([str(path)], cache) == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    assert hashed == ["shard", "shard"]


def test_one_changed_byte_is_found_although_size_and_modification_time_are_as_before(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"weights")
    cache = HashCache(None)
    before = sha256_files([str(path)], cache)
    stat = path.stat()
    tick()
    with path.open("r+b") as file:
        file.write(b"W")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert path.stat().st_size == stat.st_size
    after = sha256_files([str(path)], cache)
    assert after != before
    assert after == {str(path): hashlib.sha256(b"Weights").hexdigest()}


def test_a_file_changed_behind_a_link_is_found(tmp_path: Path) -> None:
    target, link = tmp_path / "blob", tmp_path / "shard"
    target.write_bytes(b"weights")
    link.symlink_to(target)
    cache = HashCache(None)
    sha256_files([str(link)], cache)
    tick()
    target.write_bytes(b"Weights")
    assert sha256_files([str(link)], cache) == {str(link): hashlib.sha256(b"Weights").hexdigest()}


def test_without_trust_every_byte_is_read_and_the_cache_corrected(tmp_path: Path, hashed: list[str]) -> None:
    path, store = tmp_path / "shard", tmp_path / "cache.json"
    path.write_bytes(b"weights")
    cache = HashCache(str(store))
    sha256_files([str(path)], cache)
    cache.save()
    forged = store.read_text(encoding="utf-8").replace(hashlib.sha256(b"weights").hexdigest(), "0" * 64)
    store.write_text(forged, encoding="utf-8")
    assert sha256_files([str(path)], HashCache(str(store))) == {str(path): "0" * 64}, "the cache was not used at all"
    distrustful = HashCache(str(store), trust=False)
    assert sha256_files([str(path)], distrustful) == {str(path): hashlib.sha256(b"weights").hexdigest()}
    assert hashed == ["shard", "shard"]
    distrustful.save()
    assert "0" * 64 not in store.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"PATH": 5}',
        b'{"PATH": {"stamp": "STAMP"}}',
        b'{"PATH": {"stamp": STAMP, "sha256": 7}}',
        b'{"PATH": {"stamp": STAMP}}',
    ],
    ids=["empty", "cut", "list", "null", "binary", "deep", "number", "text-stamp", "number-digest", "no-digest"],
)
def test_a_damaged_cache_file_counts_as_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path, store = tmp_path / "shard", tmp_path / "cache.json"
    path.write_bytes(b"weights")
    stat = path.stat()
    stamp = json.dumps([stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]).encode()
    store.write_bytes(content.replace(b"PATH", str(path).encode()).replace(b"STAMP", stamp))
    cache = HashCache(str(store))
    assert sha256_files([str(path)], cache) == {str(path): hashlib.sha256(b"weights").hexdigest()}
    cache.save()
    assert json.loads(store.read_text(encoding="utf-8"))[str(path)]["stamp"] == json.loads(stamp)


@pytest.mark.parametrize("change", ["grows", "is rewritten"])
def test_a_file_that_changes_while_it_is_read_is_an_error_and_not_remembered(tmp_path: Path, change: str) -> None:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(2 * PIECE))
    cache = HashCache(str(tmp_path / "cache.json"))
    tick()

    def copying(done: int, total: int) -> None:
        if done == PIECE:
            with path.open("ab" if change == "grows" else "r+b") as file:
                file.write(b"more")

    with pytest.raises(UsageError, match=f"hashing {path}: it changed while it was read"):
        sha256_files([str(path)], cache, copying)
    assert cache.lookup(str(path), path.stat()) is None


@pytest.mark.parametrize("kind", ["missing", "folder", "dangling"])
def test_what_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "shard"
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"hashing \S+/(shard|nowhere): "):
        sha256_files([str(path)], HashCache(None))


def test_nothing_is_written_when_nothing_was_added(tmp_path: Path) -> None:
    cache = HashCache(str(tmp_path / "state" / "cache.json"))
    cache.save()
    assert not (tmp_path / "state").exists()


def test_a_cache_that_cannot_be_written_costs_only_the_next_hashing(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be", encoding="utf-8")
    path = tmp_path / "shard"
    path.write_bytes(b"weights")
    cache = HashCache(str(tmp_path / "state" / "cache.json"))
    sha256_files([str(path)], cache)
    cache.save()
    assert (tmp_path / "state").read_text(encoding="utf-8") == "a file where a folder should be"
