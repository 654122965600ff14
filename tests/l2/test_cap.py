"""The hard cap as `du` sees it, and full disks under a running server."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvpersist.core import frames
from kvpersist_l2.adapter import KvPersistL2Adapter

from .harness import NAMESPACE, REPOSITORY, Client, Server, plugin, until

CAPACITY = 24 << 20
ROUNDS = 3
ROUND_S = float(os.environ.get("KVP_CAP_ROUND_S", "3"))


def du(root: Path) -> int:
    run = subprocess.run(["du", "--summarize", "--block-size=1", str(root)], capture_output=True, text=True, check=True)
    return int(run.stdout.split()[0])


def is_stopped(pid: int) -> bool:
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


class Watcher:
    """Looks at the disk while the writers stand still for a moment, since `du` is no snapshot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.looks = self.fullest = 0
        self.worst = -CAPACITY

    def look(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: is_stopped(pid))
            used = du(self.root)
            objects = len(list(self.root.glob("*/??/*.bin")))
        finally:
            os.kill(pid, signal.SIGCONT)
        self.looks += 1
        self.fullest = max(self.fullest, used)
        self.worst = max(self.worst, used - objects * frames.PAGE)


def leave_behind(root: Path) -> None:
    """What an earlier run of something else, and a writer of which nothing is known, have left."""
    shard = root / NAMESPACE / "00"
    shard.mkdir(parents=True)
    (root / "-SEP-models@0x01000100@0@00ff.data").write_bytes(bytes(3 << 20))
    (root / NAMESPACE / "notes").write_bytes(bytes(1 << 20))
    (shard / f"01000100-0-{'00' * 32}.bin.tmp.{'a' * 32}").write_bytes(bytes(1 << 20))


def run_writers(root: Path, seed: int, watcher: Watcher) -> dict[str, int]:
    """One run of eight writers; the last ends well, the others by SIGKILL.

    Returns:
        The counters of one that ended well.
    """
    chance = random.Random(seed)
    writers = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("writers.py")), str(root), str(CAPACITY), str(seed)],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}/plugins/module_utils:{REPOSITORY}/runtime"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writers.stdout is not None
        assert writers.stdout.readline() == "ready\n"
        end = time.monotonic() + ROUND_S
        while time.monotonic() < end:
            time.sleep(chance.uniform(0, 0.02))
            watcher.look(writers.pid)
        if seed < ROUNDS - 1:
            return {}
        return dict(ast.literal_eval(writers.communicate("", timeout=60)[0]))
    finally:
        writers.kill()
        writers.wait()


def test_du_never_exceeds_the_cap_in_bursts_of_eight_writers_over_restarts(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    leave_behind(root)
    watcher = Watcher(root)
    for seed in range(ROUNDS):
        counters = run_writers(root, seed, watcher)
    assert watcher.looks > 10 * ROUNDS
    assert watcher.fullest > 0.95 * CAPACITY, "it was never full; the test shows nothing"
    assert counters["rejected_capacity"] > 0
    assert counters["deleted_objects"] > 0
    assert watcher.worst <= CAPACITY

    adapter = KvPersistL2Adapter({"root": str(root), "capacity_bytes": CAPACITY, "min_free_bytes": 0})
    status = adapter.report_status()
    adapter.close()
    assert status["unknown"] == {"files": 2, "bytes": 4 << 20}
    assert status["temporary"] == {"files": 1, "bytes": 1 << 20}
    objects = [path.stat().st_size for path in root.glob("*/??/*.bin")]
    assert (status["objects"], status["object_bytes"]) == (len(objects), sum(objects))
    assert status["used_bytes"] == sum(objects) + (5 << 20)
    assert all(any(shard.iterdir()) for shard in root.glob("*/??")), "an empty folder"


@dataclass(frozen=True)
class Disk:
    """A small filesystem that a server sees and nobody else.

    Args:
        root: its path, for the server.
        server: the server on it.
        refusal: how a store is refused when it is full.
    """

    root: Path
    server: Server
    refusal: str

    @property
    def seen(self) -> Path:
        """Its path for this process."""
        return Path(f"/proc/{self.server.process.pid}/root{self.root}")

    def fill(self) -> None:
        """Takes all its room, as another program does."""
        with contextlib.suppress(OSError):
            if self.refusal == "rejected_disk_full":
                for number in range(1000):
                    (self.seen / f"filler-{number}").touch()
            with (self.seen / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(frames.PAGE)):
                    pass

    def make_room(self) -> None:
        for path in self.seen.glob("filler*"):
            path.unlink()


# The one without inodes has bytes left, so only a write itself finds out that it is full.
MOUNTS = {
    "tmpfs": ("mount -t tmpfs -o size=8m tmpfs", "rejected_free_space"),
    "ext4": ("mount -o loop {image}", "rejected_free_space"),
    "tmpfs without inodes": ("mount -t tmpfs -o size=64m,nr_inodes=60 tmpfs", "rejected_disk_full"),
}


@pytest.fixture(params=MOUNTS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    root, image = tmp_path / "cache", tmp_path / "image"
    root.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    if request.param == "ext4":
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("mkfs.ext4 is not installed")
        with image.open("wb") as file:
            file.truncate(10 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)], check=True)
    mount, refusal = MOUNTS[request.param]
    mount = mount.format(image=image)
    unshared = ("unshare", "--mount", "--propagation", "private")
    tried = subprocess.run([*unshared, "sh", "-c", f'{mount} "$0"', str(root)], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"mounting a small filesystem is not allowed here: {tried.stderr.strip()}")
    server = Server(
        tmp_path / "server.log", plugin(root), before=(*unshared, "sh", "-c", f'{mount} "$0" && exec "$@"', str(root))
    )
    yield Disk(root, server, refusal)
    server.kill()


def test_a_full_disk_breaks_nothing_and_stores_resume(disk: Disk) -> None:
    server = disk.server
    server.wait()
    client = Client(server, 8)
    assert [client.ask(prompt) for prompt in range(3)] == [0, 0, 0]
    until(lambda: server.status()["objects"] == 3 * Client.CHUNKS)
    disk.fill()
    assert [client.ask(prompt) for prompt in range(3, 8)] == [0] * 5, "what cannot be stored is served all the same"
    server.forget()
    status = server.status()
    counters = status["counters"]
    assert counters[disk.refusal] == 5 * Client.CHUNKS
    assert not [name for name in counters if "error" in name and name != "bookkeeping_errors"], counters
    assert status["is_healthy"]
    assert not list(disk.seen.rglob("*.tmp.*"))
    assert [client.ask(prompt) for prompt in range(3)] == [Client.CHUNKS] * 3, "what is there is served from there"

    disk.make_room()
    server.forget()
    for prompt in (3, 4):
        client.ask(prompt)
        server.forget()
        assert client.ask(prompt) == Client.CHUNKS
    status = server.status()
    files = [path.stat().st_size for path in disk.seen.glob("kvp-*/??/*.bin")]
    assert (status["objects"], status["used_bytes"]) == (len(files), sum(files))
    client.close()
