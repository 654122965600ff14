"""The adapter inside a real LMCache server: take-over, the lock of a root, and what it costs to do nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import MIB, START_S, Client, Driver, Memory, Server, object_key, plugin

IDLE_S = 20.0
# Of one CPU. Two servers differ by noise, too.
MOST_IDLE_CPU = 0.005


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "server.log", plugin(tmp_path / "cache"))
    yield running
    running.kill()


def test_a_server_takes_over_what_is_on_disk_and_reports_it(make: Any, memory: Memory, tmp_path: Path) -> None:
    driver: Driver = make()
    keys, objects = [object_key(number) for number in range(5)], memory.filled(5)
    driver.store(keys, objects)
    driver.adapter.close()
    memory.free(objects)

    server = Server(tmp_path / "server.log", plugin(tmp_path / "cache"))
    try:
        server.wait()
        status = server.status()
        assert status["is_healthy"]
        assert (status["objects"], status["used_bytes"]) == (5, 5 * (MIB + 4096))
        assert status["listeners"] >= 1  # the eviction policy knows them
        eviction = json.loads(server.get("/status"))["storage_manager"]["l2_eviction_controller"]["adapters"]
        assert [adapter["total_bytes_used"] for adapter in eviction] == [5 * (MIB + 4096)]
        assert "kvpersist_l2_used_bytes" in server.get("/metrics")
        assert server.stop() is not None
    finally:
        server.kill()
    assert not list((tmp_path / "cache" / ".writers").iterdir()), "a server that was stopped leaves no marker"


def test_a_second_server_on_one_root_is_refused_and_told_by_whom(server: Server, tmp_path: Path) -> None:
    server.wait()
    second = Server(tmp_path / "second.log", plugin(tmp_path / "cache"))
    try:
        assert second.process.wait(timeout=START_S) != 0
    finally:
        second.kill()
    (line, *_) = [text for text in second.log.read_text().splitlines() if f"locking {tmp_path / 'cache'}" in text]
    assert f"it is used by process {server.process.pid} on {os.uname().nodename} since " in line
    assert "Stop that server, or give this one a cache root of its own." in line
    assert server.status()["is_healthy"]


def cpu_seconds(pid: int) -> float:
    """Of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_adapter_takes_no_cpu(server: Server, tmp_path: Path) -> None:
    bare = Server(tmp_path / "bare.log", None)
    try:
        for running in (server, bare):
            running.wait()
        client = Client(server, 1)
        client.ask(0)
        server.forget()
        assert client.ask(0) == Client.CHUNKS
        client.close()
        pids = (server.process.pid, bare.process.pid)
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(IDLE_S)
        used, without = ((cpu_seconds(pid) - start) / IDLE_S for pid, start in zip(pids, before))
    finally:
        bare.kill()
    assert used - without < MOST_IDLE_CPU, (used, without)
