"""The adapter inside a real LMCache server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import MIB, Driver, Memory, object_key

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 180


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """One `lmcache server` with the adapter as its plugin."""

    def __init__(self, root: Path, log: Path) -> None:
        self.http_port = free_port()
        adapter = {
            "type": "plugin",
            "module_path": "kvpersist_l2.adapter",
            "class_name": "KvPersistL2Adapter",
            "adapter_params": {"root": str(root), "capacity_bytes": 1 << 30, "min_free_bytes": 0},
            "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1},
        }
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "lmcache.cli.main", "server"),
                    *("--host", "127.0.0.1", "--port", str(free_port())),
                    *("--http-host", "127.0.0.1", "--http-port", str(self.http_port)),
                    *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--chunk-size", "256"),
                    *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
                    *("--l2-adapter", json.dumps(adapter)),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{REPOSITORY}/plugins/module_utils:{REPOSITORY}/runtime",
                    "LMCACHE_TRACK_USAGE": "false",
                    "DO_NOT_TRACK": "1",
                    "LMCACHE_LOG_LEVEL": "INFO",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/status")
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def adapter_status(self) -> dict[str, Any]:
        status = json.loads(self.get("/status"))
        (adapter,) = status["storage_manager"]["l2_adapters"]
        return dict(adapter)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "cache", tmp_path / "server.log")
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def test_a_server_takes_over_what_is_on_disk_and_reports_it(make: Any, memory: Memory, tmp_path: Path) -> None:
    driver: Driver = make()
    keys, objects = [object_key(number) for number in range(5)], memory.filled(5)
    driver.store(keys, objects)
    driver.adapter.close()
    memory.free(objects)

    server = Server(tmp_path / "cache", tmp_path / "server.log")
    try:
        server.wait()
        status = server.adapter_status()
        assert status["is_healthy"]
        assert (status["objects"], status["used_bytes"]) == (5, 5 * (MIB + 4096))
        assert status["listeners"] >= 1  # the eviction policy knows them
        eviction = json.loads(server.get("/status"))["storage_manager"]["l2_eviction_controller"]["adapters"]
        assert [adapter["total_bytes_used"] for adapter in eviction] == [5 * (MIB + 4096)]
        assert "kvpersist_l2_used_bytes" in server.get("/metrics")
        assert server.stop() is not None
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
    assert not list((tmp_path / "cache" / ".writers").iterdir()), "a server that was stopped leaves no marker"


def test_a_second_server_on_one_root_is_refused(make: Any, server: Server, tmp_path: Path) -> None:
    server.wait()
    second = Server(tmp_path / "cache", tmp_path / "second.log")
    assert second.process.wait(timeout=START_S) != 0
    assert f"it is used by process {server.process.pid} on " in second.log.read_text()
