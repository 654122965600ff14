from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvpersist.core.errors import UsageError
from kvpersist.core.writers import Found, Liveness
from kvpersist.host import writers

PACKAGE = Path(writers.__file__).parents[2]


def observer(root: Path, later_s: float = 0) -> writers.Observer:
    return writers.Observer(str(root), writers.own_marker(), time.time() + later_s)


def spawn(code: str, root: Path, *prefix: str) -> subprocess.Popen[str]:
    """Runs Python code that prints one line when it is ready, then reads its stdin."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, str(root)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


REGISTER = """
import sys
from kvpersist.host.writers import Registration
registration = Registration(sys.argv[1])
registration.ensure()
print(registration.writer, flush=True)
sys.stdin.read()
"""


def test_an_own_registration_is_live_until_it_is_removed(tmp_path: Path) -> None:
    registration = writers.Registration(str(tmp_path))
    registration.heartbeat()
    assert observer(tmp_path).state(registration.writer) is None, "not registered before it is needed"
    registration.ensure()
    registration.ensure()
    assert observer(tmp_path).state(registration.writer) is Liveness.LIVE
    registration.remove()
    registration.remove()
    assert observer(tmp_path).state(registration.writer) is None


def test_a_killed_writer_is_dead_at_once_and_its_marker_goes_after_an_hour(tmp_path: Path) -> None:
    child = spawn(REGISTER, tmp_path)
    assert child.stdout is not None
    writer = child.stdout.readline().strip()
    assert observer(tmp_path).state(writer) is Liveness.LIVE
    child.kill()
    child.wait()
    assert observer(tmp_path).state(writer) is Liveness.DEAD
    assert observer(tmp_path).remove_dead_markers() == 0
    assert observer(tmp_path, 3700).remove_dead_markers() == 1
    assert observer(tmp_path).state(writer) is None


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = spawn(REGISTER, tmp_path)
    assert child.stdout is not None
    writer = child.stdout.readline().strip()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
    assert observer(tmp_path).state(writer) is Liveness.DEAD
    child.wait()


def test_a_reused_pid_is_another_process() -> None:
    own = writers.own_marker()
    assert writers.look_for(own) is Found.SAME
    assert writers.look_for(dataclasses.replace(own, start_ticks=own.start_ticks + 1)) is Found.OTHER


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a new PID namespace needs root")
def test_a_writer_in_another_pid_namespace_lives_by_its_heartbeat(tmp_path: Path) -> None:
    child = spawn(REGISTER, tmp_path, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    assert child.stdout is not None
    writer = child.stdout.readline().strip()
    try:
        assert observer(tmp_path).state(writer) is Liveness.LIVE
        assert observer(tmp_path, 119).state(writer) is Liveness.LIVE
        assert observer(tmp_path, 130).state(writer) is Liveness.DEAD
    finally:
        child.kill()
        child.wait()
    assert observer(tmp_path).state(writer) is Liveness.LIVE  # within two minutes nobody here can know better


def test_a_marker_that_cannot_be_read_decides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / ".writers"
    folder.mkdir()
    (folder / f"{'a' * 32}.json").write_bytes(b"\xff")
    (folder / f"{'b' * 32}.json").mkdir()
    for writer in ("a" * 32, "b" * 32):
        assert observer(tmp_path, 1e6).state(writer) is Liveness.UNDECIDABLE
    assert observer(tmp_path, 1e6).remove_dead_markers() == 0


def test_a_heartbeat_keeps_a_marker_young_and_brings_it_back(tmp_path: Path) -> None:
    registration = writers.Registration(str(tmp_path))
    registration.ensure()
    marker = tmp_path / ".writers" / f"{registration.writer}.json"
    os.utime(marker, (1, 1))
    registration.heartbeat()
    assert time.time() - marker.stat().st_mtime < 10
    marker.unlink()
    registration.heartbeat()
    assert marker.exists()


def test_the_lock_admits_one_and_names_the_holder(tmp_path: Path) -> None:
    assert not writers.is_locked(str(tmp_path))
    lock = writers.RootLock(str(tmp_path), writers.own_marker())
    assert writers.is_locked(str(tmp_path))
    with pytest.raises(UsageError, match=rf"used by process {os.getpid()} on .+ since 20..-"):
        writers.RootLock(str(tmp_path), writers.own_marker())
    lock.release()
    lock.release()
    assert not writers.is_locked(str(tmp_path))
    writers.RootLock(str(tmp_path), writers.own_marker()).release()


def test_the_lock_of_a_killed_server_is_free(tmp_path: Path) -> None:
    child = spawn(
        "import sys\nfrom kvpersist.host import writers as w\n"
        "lock = w.RootLock(sys.argv[1], w.own_marker())\nprint('held', flush=True)\nsys.stdin.read()",
        tmp_path,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match=f"process {child.pid} "):
        writers.RootLock(str(tmp_path), writers.own_marker())
    child.kill()
    child.wait()
    writers.RootLock(str(tmp_path), writers.own_marker()).release()
