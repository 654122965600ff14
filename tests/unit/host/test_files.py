"""host.files: whole files or none, links, sizes."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import stat
import time
from pathlib import Path

import pytest
from kvpersist.core.errors import KvpError, UsageError
from kvpersist.host import files

OLD, NEW = "old " * 50_000, "new!" * 80_000


def rewrite_forever(path: str) -> None:
    while True:
        files.write_atomic(path, NEW)
        files.write_atomic(path, OLD)


def test_written_file_has_the_content_and_mode_0600_in_a_private_folder(tmp_path: Path) -> None:
    path = tmp_path / "made" / "settings.env"
    files.write_atomic(str(path), "Жизнь = 命\n")
    assert path.read_bytes() == "Жизнь = 命\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["settings.env"]


def test_written_file_takes_another_mode_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    before = os.umask(0o077)
    try:
        files.write_atomic(str(path), "text", 0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_disk_that_takes_no_more_leaves_the_old_content_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomic(str(path), "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises((OSError, KvpError)):
            files.write_atomic(str(path), NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("step", ["fsync", "fchmod", "replace"])
def test_a_failure_in_any_step_leaves_the_old_content_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    files.write_atomic(str(path), "old")

    def broken(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, step, broken)
    with pytest.raises((OSError, KvpError)):
        files.write_atomic(str(path), "new")
    monkeypatch.undo()
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_interrupt_leaves_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(str(tmp_path / "file"), "new")
    assert os.listdir(tmp_path) == []


def test_a_file_is_whole_after_sigkill_at_a_random_moment(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomic(str(path), OLD)
    draw = random.Random(2026)  # moments, no secrets
    fork = multiprocessing.get_context("fork")
    seen = set()
    for _ in range(40):
        writer = fork.Process(target=rewrite_forever, args=(str(path),), daemon=True)
        writer.start()
        time.sleep(draw.uniform(0.002, 0.03))
        writer.kill()
        writer.join()
        content = path.read_text(encoding="utf-8")
        assert content in (OLD, NEW)
        seen.add(content)
    assert seen == {OLD, NEW}, "the writers never got to write, so nothing was shown"


def test_a_link_is_made_with_its_folder_and_replaced(tmp_path: Path) -> None:
    link = tmp_path / "family" / "kvp-1"
    files.link_atomic(str(link), "/models/one")
    assert files.link_target(str(link)) == "/models/one"
    files.link_atomic(str(link), "/models/two")
    assert files.link_target(str(link)) == "/models/two"
    assert os.listdir(link.parent) == ["kvp-1"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_link_is_never_replaced_by_one(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kvp-1"
    if kind == "file":
        path.write_text("precious", encoding="utf-8")
    else:
        path.mkdir()
    with pytest.raises(UsageError, match=f"linking {path}: something that is not a link stands there"):
        files.link_atomic(str(path), "/models/one")
    assert not path.is_symlink()
    assert path.exists()
    assert os.listdir(tmp_path) == ["kvp-1"]


def test_a_rest_of_a_killed_process_with_the_same_pid_does_not_stop_a_link(tmp_path: Path) -> None:
    link = tmp_path / "kvp-1"
    (tmp_path / f"kvp-1.{os.getpid()}.new").symlink_to("/models/dead")
    files.link_atomic(str(link), "/models/one")
    assert files.link_target(str(link)) == "/models/one"
    assert os.listdir(tmp_path) == ["kvp-1"]


def test_there_is_no_link_target_where_there_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert files.link_target(str(tmp_path / "file")) is None
    assert files.link_target(str(tmp_path / "nothing")) is None


def test_bytes_of_a_tree_leave_out_temporary_files_of_writers(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "one.bin").write_bytes(b"x" * 1000)
    (tmp_path / "a" / "b" / "two.bin").write_bytes(b"x" * 500)
    (tmp_path / "a" / "three.bin.tmp.42").write_bytes(b"x" * 7000)
    (tmp_path / "a" / "four.tmp").write_bytes(b"x" * 7000)
    assert files.tree_bytes(str(tmp_path)) == 1500
    assert files.tree_bytes(str(tmp_path / "nothing")) == 0


def test_bytes_of_a_tree_survive_files_that_vanish_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stays").write_bytes(b"x" * 10)
    (tmp_path / "vanishes").write_bytes(b"x" * 10)
    real = os.lstat

    def evicting(path: str) -> os.stat_result:
        if path.endswith("vanishes"):
            Path(path).unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(files.os, "lstat", evicting)
    assert files.tree_bytes(str(tmp_path)) == 10


def test_the_page_cache_is_dropped_also_for_pages_not_yet_written(tmp_path: Path) -> None:
    size = 8 * 1024 * 1024
    path = tmp_path / "deep" / "object.bin"
    path.parent.mkdir()
    path.write_bytes(os.urandom(size))
    (tmp_path / "dangling").symlink_to("/nowhere")
    path.read_bytes()
    files.drop_page_cache(str(tmp_path))
    before = storage_read_bytes_of_self()
    path.read_bytes()
    if files_come_from_memory(tmp_path):
        pytest.skip("the temporary folder lies in memory, where nothing can be dropped")
    assert storage_read_bytes_of_self() - before >= size


def storage_read_bytes_of_self() -> int:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))


def files_come_from_memory(path: Path) -> bool:
    from kvpersist.host.preflight import filesystem_type

    return filesystem_type(str(path)) in ("tmpfs", "ramfs")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "no such file or directory"),
        (b"\xff\xfe", "can't decode"),
        (b"{", "it is not JSON"),
        (b"[]", "it holds no JSON object"),
        (b"[" * 200_000, "it is not JSON"),
        (b"", "it is not JSON"),
    ],
)
def test_json_that_cannot_be_used_is_one_line_with_the_path(tmp_path: Path, content: bytes | None, cause: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        files.read_json(str(path))
    text = str(caught.value)
    assert text.startswith(f"reading {path}: ")
    assert cause in text
    assert "\n" not in text
