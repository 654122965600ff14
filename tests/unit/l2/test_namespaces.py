"""Whose temporary files a starting tier sweeps, among real processes in real PID namespaces."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .harness import TierDriver, command, running

NEW_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a new PID namespace needs root"
)


def left(root: Path, *before: str) -> list[str]:
    """Temporary files that a tier leaves when it starts, in the namespace of this process or another."""
    with running("judge", root, before=before) as (_, said):
        return list(said["left"])


def silence(root: Path, seconds: float) -> None:
    """Makes the last heartbeat of every writer so old."""
    for marker in (root / ".writers").iterdir():
        os.utime(marker, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("before", [(), NEW_NAMESPACE], ids=["from outside", "from a third namespace"])
def test_a_writer_in_another_namespace_is_judged_by_its_heartbeat(tmp_path: Path, before: tuple[str, ...]) -> None:
    with running("writer", tmp_path, before=NEW_NAMESPACE) as (_, writer):
        # Here that pid is another process; in the third namespace it is the judge itself.
        assert writer["pid"] == 1
        assert left(tmp_path, *before) == [writer["temporary"]]
        silence(tmp_path, 110)
        assert left(tmp_path, *before) == [writer["temporary"]]
    assert left(tmp_path, *before) == [writer["temporary"]], "it is dead, which cannot be known yet"
    silence(tmp_path, 130)
    assert left(tmp_path, *before) == []


def test_a_writer_of_the_same_namespace_is_judged_by_its_process(tmp_path: Path) -> None:
    with running("writer", tmp_path) as (_, writer):
        silence(tmp_path, 100_000)
        assert left(tmp_path) == [writer["temporary"]], "a process that lives needs no heartbeat"
    assert left(tmp_path) == []


def test_a_later_process_with_the_pid_of_a_dead_writer_is_not_that_writer(tmp_path: Path) -> None:
    if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
        pytest.skip("this kernel lets nobody choose the next pid")
    with running("reuse", tmp_path, before=NEW_NAMESPACE) as (_, exists):
        assert exists == {"dead": False, "live": True}


def test_a_server_in_another_namespace_holds_the_lock(tmp_path: Path) -> None:
    with running("judge", tmp_path, before=NEW_NAMESPACE):
        for before in ((), NEW_NAMESPACE):
            refused = subprocess.run(**command("judge", tmp_path, before), stderr=subprocess.PIPE)
            assert refused.returncode
            assert re.search(rf"it is used by process 1 on {os.uname().nodename} since ", refused.stderr)
    TierDriver(tmp_path).close()


def stop_in_a_store(pid: int, root: Path) -> Path:
    """Stops a process where it has a temporary file."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        temporary = next(root.rglob("*.tmp.*"), None)
        if temporary is not None:
            return temporary
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)


def test_a_running_store_survives_even_a_server_that_got_past_the_lock(tmp_path: Path) -> None:
    with running("store", tmp_path, before=NEW_NAMESPACE) as (process, _):
        (writer,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        temporary = stop_in_a_store(int(writer), tmp_path)
        (tmp_path / ".lock").unlink()
        assert left(tmp_path) == [str(temporary)]
        os.kill(int(writer), signal.SIGCONT)
        stop_in_a_store(int(writer), tmp_path)  # it goes on storing
        assert process.poll() is None
