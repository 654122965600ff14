"""host.hashing: digests, and when a remembered one may be used."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvp_kit import clean_environment, wait_until
from kvpersist.core.errors import UsageError
from kvpersist.host import hashing
from kvpersist.host.hashing import HashCache, sha256_files

PIECE = hashing._PIECE
COARSEST_TIME_NS = hashing._COARSEST_TIME_NS
LATER_NS = time.time_ns() + 3600 * 10**9  # after every file that the tests write
HASH_ARGUMENTS = """
import resource, sys
from kvpersist.host import hashing
from kvpersist.host.hashing import HashCache, sha256_files
hashing._COARSEST_TIME_NS = 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sha256_files(sys.argv[2:], HashCache(sys.argv[1], keep=True))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


class CountedBytes:
    """A progress receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.threads: set[int] = set()

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        self.threads.add(threading.get_ident())


@pytest.fixture(autouse=True)
def _files_are_old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are seconds old at most; the tests about that say so themselves."""
    monkeypatch.setattr(hashing, "_COARSEST_TIME_NS", 0)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files whose bytes were really read."""
    read: list[str] = []
    real = hashing._Hashing._digest

    def watched(self: Any, file: Any) -> str:
        read.append(os.path.basename(file.path))
        return real(self, file)

    monkeypatch.setattr(hashing._Hashing, "_digest", watched)
    return read


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def use_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


def tick() -> None:
    """Lets the clock of file times, which moves in steps of some milliseconds, go on."""
    time.sleep(0.03)


@pytest.mark.parametrize("cores", [1, 8], ids=["in turn", "reading ahead"])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 7])
def test_digest_is_that_of_hashlib_around_the_size_of_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, cores: int
) -> None:
    use_cores(monkeypatch, cores)
    monkeypatch.setattr(hashing, "_LARGE", 0)
    content = os.urandom(size)
    path = tmp_path / "shard"
    path.write_bytes(content)
    assert sha256_files([str(path)], HashCache(None)) == {str(path): sha256(content)}


def test_many_files_each_get_their_own_digest_and_one_behind_two_names_is_read_once(
    tmp_path: Path, hashed: list[str]
) -> None:
    contents = {str(tmp_path / f"shard{number}"): os.urandom(number * 1000) for number in range(20)}
    for path, content in contents.items():
        Path(path).write_bytes(content)
    expected = {path: sha256(content) for path, content in contents.items()}
    (tmp_path / "again").symlink_to(tmp_path / "shard7")
    expected[str(tmp_path / "again")] = expected[str(tmp_path / "shard7")]
    assert sha256_files(list(expected), HashCache(None)) == expected
    assert len(hashed) == 20


def test_progress_sums_up_to_what_must_be_read_in_the_caller_s_thread(tmp_path: Path) -> None:
    cache = HashCache(None)
    paths = []
    for number in range(3):
        paths.append(str(tmp_path / f"shard{number}"))
        Path(paths[-1]).write_bytes(os.urandom(PIECE + number))
    sha256_files(paths[:1], cache)
    progress = CountedBytes()
    sha256_files(paths, cache, progress)
    total = 2 * PIECE + 3
    assert (progress.calls[0], progress.calls[-1]) == ((0, total), (total, total))
    assert progress.calls == sorted(progress.calls)
    assert progress.threads == {threading.get_ident()}
    progress = CountedBytes()
    sha256_files(paths, cache, progress)
    assert progress.calls == []


def test_an_unchanged_file_is_not_read_again_also_not_in_another_run(tmp_path: Path, hashed: list[str]) -> None:
    path, store = tmp_path / "shard", str(tmp_path / "state" / "cache.jsonl")
    path.write_bytes(b"weights")
    first = sha256_files([str(path)], HashCache(store, keep=True))
    assert sha256_files([str(path)], HashCache(store)) == first
    assert hashed == ["shard"]
    assert os.stat(store).st_mode & 0o777 == 0o600


def test_without_keep_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"weights")
    sha256_files([str(tmp_path / "shard")], HashCache(str(tmp_path / "state" / "cache.jsonl")))
    assert os.listdir(tmp_path) == ["shard"]


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


def test_a_file_that_may_change_again_with_the_same_times_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_COARSEST_TIME_NS", COARSEST_TIME_NS)
    monkeypatch.setattr(hashing, "_stamp", lambda stat: (7, 0, 0, 1))  # a file system whose clock stands still
    path, store = tmp_path / "shard", str(tmp_path / "cache.jsonl")
    path.write_bytes(b"weights")
    assert sha256_files([str(path)], HashCache(store, keep=True)) == {str(path): sha256(b"weights")}
    path.write_bytes(b"Weights")
    assert sha256_files([str(path)], HashCache(store, keep=True)) == {str(path): sha256(b"Weights")}


def test_a_file_is_remembered_once_its_times_are_old_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    monkeypatch.setattr(hashing, "_COARSEST_TIME_NS", COARSEST_TIME_NS)
    path, cache = tmp_path / "shard", HashCache(None)
    path.write_bytes(b"weights")
    changed = path.stat().st_ctime_ns
    for age, remembered in ((-1, False), (COARSEST_TIME_NS - 1, False), (COARSEST_TIME_NS, True)):
        monkeypatch.setattr(time, "time_ns", lambda age=age: changed + age)
        sha256_files([str(path)], cache)
        assert (cache.lookup(str(path), path.stat()) is not None) == remembered
    assert hashed == ["shard"] * 3


def test_young_files_are_read_last_and_large_ones_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    use_cores(monkeypatch, 1)
    monkeypatch.setattr(hashing, "_COARSEST_TIME_NS", COARSEST_TIME_NS)
    for name, size in (("small", 1), ("large", 9), ("medium", 5), ("young", 20)):
        tick()
        (tmp_path / name).write_bytes(bytes(size))
    young = (tmp_path / "young").stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: young + COARSEST_TIME_NS - 1)
    sha256_files([str(tmp_path / name) for name in ("young", "small", "large", "medium")], HashCache(None))
    assert hashed == ["large", "medium", "small", "young"]


def test_without_trust_every_byte_is_read_and_the_cache_corrected(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = tmp_path / "shard", str(tmp_path / "cache.jsonl")
    path.write_bytes(b"weights")
    monkeypatch.setattr(time, "time_ns", lambda: LATER_NS)
    HashCache(store, keep=True).remember(str(path), path.stat(), "0" * 64, LATER_NS)
    assert sha256_files([str(path)], HashCache(store)) == {str(path): "0" * 64}, "the cache was not used at all"
    right = {str(path): sha256(b"weights")}
    assert sha256_files([str(path)], HashCache(store, trust=False, keep=True)) == right
    assert sha256_files([str(path)], HashCache(store)) == right
    assert hashed == ["shard"]


# A damaged cache file


def cache_file(folder: Path) -> tuple[Path, dict[str, str]]:
    """A cache file and what it knows: three files that do not have the digests that it says."""
    store, known = folder / "cache.jsonl", {}
    cache = HashCache(str(store), keep=True)
    for number in range(3):
        path = folder / f"shard{number}\udcff"
        path.write_bytes(bytes(number))
        known[str(path)] = f"{number:064x}"
        cache.remember(str(path), path.stat(), known[str(path)], LATER_NS)
    return store, known


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, str]]:
    store, known = cache_file(tmp_path_factory.mktemp("cache"))
    assert [HashCache(str(store)).lookup(path, os.stat(path)) for path in known] == list(known.values())
    return store, store.read_bytes(), known


def assert_right_or_unknown(store: Path, known: dict[str, str]) -> None:
    """Whatever the file holds: a digest is the one that was written, or not known; new ones are found again."""
    cache = HashCache(str(store), keep=True)
    for path, digest in known.items():
        assert cache.lookup(path, os.stat(path)) in (digest, None)
    first = next(iter(known))
    cache.remember(first, os.stat(first), known[first], LATER_NS)
    assert HashCache(str(store)).lookup(first, os.stat(first)) == known[first]


@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 3), st.binary(max_size=3)), max_size=4))
def test_no_edit_makes_the_cache_give_a_wrong_digest(
    written: tuple[Path, bytes, dict[str, str]], edits: list[tuple[int, int, bytes]]
) -> None:
    store, content, known = written
    for position, removed, added in edits:
        start = position % (len(content) + 1)
        content = content[:start] + added + content[start + removed :]
    store.write_bytes(content)
    assert_right_or_unknown(store, known)


@given(length=st.integers(0, 1000))
def test_a_cut_cache_file_knows_what_is_whole(written: tuple[Path, bytes, dict[str, str]], length: int) -> None:
    store, content, known = written
    store.write_bytes(content[:length])
    lines = content[:length].split(b"\n")
    whole = [line in lines for line in content.split(b"\n") if line]
    cache = HashCache(str(store))
    assert [cache.lookup(path, os.stat(path)) is not None for path in known] == whole
    assert_right_or_unknown(store, known)


@given(content=st.binary(max_size=200))
def test_any_bytes_may_stand_in_the_cache_file(written: tuple[Path, bytes, dict[str, str]], content: bytes) -> None:
    store, _, known = written
    store.write_bytes(content)
    assert_right_or_unknown(store, known)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(lines=st.lists(JSON | st.tuples(st.text(), st.text() | JSON, st.lists(JSON, max_size=5), JSON), max_size=4))
def test_any_json_may_stand_in_the_cache_file(written: tuple[Path, bytes, dict[str, str]], lines: list[Any]) -> None:
    store, _, known = written
    store.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert_right_or_unknown(store, known)


def test_a_deep_line_a_pipe_and_a_folder_count_as_an_empty_cache(tmp_path: Path) -> None:
    (tmp_path / "deep").write_bytes(b"[" * 200_000)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    shard = tmp_path / "shard"
    shard.write_bytes(b"weights")
    for name in ("deep", "folder", "pipe"):
        cache = HashCache(str(tmp_path / name))
        assert cache.lookup(str(shard), shard.stat()) is None
        assert sha256_files([str(shard)], cache) == {str(shard): sha256(b"weights")}


def test_a_cache_file_full_of_outdated_lines_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, known = cache_file(tmp_path)
    path = next(iter(known))
    for number in range(20):
        HashCache(str(store), keep=True).remember(path, os.stat(path), f"{number:064x}", LATER_NS)
    assert len(store.read_bytes().splitlines()) == 24
    monkeypatch.setattr(hashing, "_OUTDATED_LINES", 10)
    HashCache(str(store))
    assert len(store.read_bytes().splitlines()) == 24, "a cache that is only read was written"
    HashCache(str(store), keep=True)
    assert len(store.read_bytes().splitlines()) == 4
    known[path] = f"{19:064x}"
    assert [HashCache(str(store)).lookup(path, os.stat(path)) for path in known] == list(known.values())


# Changes and interruptions


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize("change", [grow, rewrite, replace])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_file_that_changes_while_it_is_read_is_an_error_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, moment: str
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(2 * PIECE))
    cache = HashCache(str(tmp_path / "cache.jsonl"), keep=True)
    tick()
    real = hashing._Hashing._sha256

    def copying(self: Any, stream: Any) -> str:
        digest = real(self, stream)
        change(path)
        return digest

    if moment == "after":
        monkeypatch.setattr(hashing._Hashing, "_sha256", copying)
    with pytest.raises(UsageError, match=f"hashing {path}: it changed while it was read"):
        sha256_files([str(path)], cache, lambda done, total: change(path) if moment == "before" else None)
    assert cache.lookup(str(path), path.stat()) is None
    assert not (tmp_path / "cache.jsonl").exists()


def test_an_error_in_one_file_ends_the_others_at_once_and_keeps_the_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cores(monkeypatch, 2)
    done, endless, bad = (tmp_path / name for name in ("done", "endless", "bad"))
    done.write_bytes(b"weights")
    endless.touch()
    os.truncate(endless, 1 << 40)
    bad.mkdir()
    cache = HashCache(None)
    sha256_files([str(done)], cache)
    began = time.monotonic()
    with pytest.raises(UsageError, match=f"hashing {bad}: "):
        sha256_files([str(done), str(endless), str(bad)], cache)
    assert time.monotonic() - began < 30, "a terabyte takes minutes"
    assert cache.lookup(str(done), done.stat()) == sha256(b"weights")
    assert cache.lookup(str(endless), endless.stat()) is None


def start_hashing(store: Path, *paths: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HASH_ARGUMENTS, str(store), *map(str, paths)]
    return subprocess.Popen(argv, env=clean_environment(), stdout=subprocess.PIPE, text=True)


def test_what_was_finished_before_a_kill_is_not_read_again(tmp_path: Path, hashed: list[str]) -> None:
    paths = [tmp_path / f"shard{number}" for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(os.urandom(PIECE + number))
    store, endless = tmp_path / "state" / "cache.jsonl", tmp_path / "endless"
    os.mkfifo(endless)  # nobody ever writes into it
    child = start_hashing(store, *paths, endless)
    wait_until(lambda: store.exists() and len(store.read_bytes().splitlines()) == 1 + len(paths))
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    more = tmp_path / "more"
    more.write_bytes(b"weights")
    digests = sha256_files([str(path) for path in (*paths, more)], HashCache(str(store), keep=True))
    assert hashed == ["more"]
    assert digests == {str(path): sha256(path.read_bytes()) for path in (*paths, more)}


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"shard{number}" for number in range(3)]
    for path in paths:
        path.touch()
        os.truncate(path, 200_000_000)
    output, _ = start_hashing(tmp_path / "cache.jsonl", *paths).communicate()
    workers = min(len(os.sched_getaffinity(0)), hashing._MOST_WORKERS)
    assert int(output) * 1024 < 2 * PIECE * workers + 20_000_000


@pytest.mark.parametrize(("available", "dropped"), [(3 * PIECE, 0), (3 * PIECE - 1, 3 * PIECE)])
def test_pages_of_a_model_that_does_not_fit_memory_are_not_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, dropped: int
) -> None:
    path, ranges = tmp_path / "shard", []
    path.write_bytes(bytes(3 * PIECE))

    def watched(descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            ranges.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", watched)
    monkeypatch.setattr(hashing, "_available_memory", lambda: available)
    sha256_files([str(path)], HashCache(None))
    assert sum(length for _, length in ranges) == dropped
    assert ranges == [(PIECE * number, PIECE) for number in range(len(ranges))]


def test_available_memory_is_that_of_this_machine() -> None:
    assert 1e8 < hashing._available_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_path_whose_links_lead_elsewhere_here_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below /proc/<pid>/root, where a link is followed in another root than the path without links says."""
    seen, other = tmp_path / "seen", tmp_path / "other"
    seen.write_bytes(b"of the container")
    other.write_bytes(b"of this host")
    monkeypatch.setattr(os.path, "realpath", lambda path: str(other))
    cache = HashCache(None)
    assert sha256_files([str(seen)], cache) == {str(seen): sha256(b"of the container")}
    assert cache.lookup(str(other), other.stat()) is None


@pytest.mark.parametrize("kind", ["missing", "folder", "dangling"])
def test_what_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "shard"
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"hashing \S+/(shard|nowhere): "):
        sha256_files([str(path)], HashCache(None))


def test_a_cache_that_cannot_be_written_costs_only_the_next_hashing(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be", encoding="utf-8")
    path = tmp_path / "shard"
    path.write_bytes(b"weights")
    cache = HashCache(str(tmp_path / "state" / "cache.jsonl"), keep=True)
    assert sha256_files([str(path)], cache) == {str(path): sha256(b"weights")}
    assert (tmp_path / "state").read_text(encoding="utf-8") == "a file where a folder should be"
