"""What the tests of the adapter share. They need LMCache, so they run in its environment with pytest beside it."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig, parse_args
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.platform import consume_fd

NAMESPACE = "kvp-" + "5" * 32
MIB = 1 << 20
CHUNK = 256
REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 180


def object_key(number: object, model: str = f"/models/mimo/{NAMESPACE}", salt: str = "") -> ObjectKey:
    chunk_hash = hashlib.blake2b(repr(number).encode(), digest_size=32).digest()
    return ObjectKey(chunk_hash, model, 0x01000100, 0, salt)


class Memory:
    """LMCache's own first tier: real memory, real memory objects."""

    def __init__(self, size: int) -> None:
        self._manager = L1MemoryManager(L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name=""))
        self.description = self._manager.get_l1_memory_desc()

    def objects(self, count: int, size: int = MIB, dtype: Any = torch.bfloat16) -> list[Any]:
        layout = MemoryLayoutDesc([torch.Size([size // dtype.itemsize])], [dtype])
        error, objects = self._manager.allocate(layout, count)
        assert len(objects) == count, error
        return list(objects)

    def filled(self, count: int, size: int = MIB, seed: int = 0, dtype: Any = torch.bfloat16) -> list[Any]:
        objects = self.objects(count, size, dtype)
        for number, memory in enumerate(objects):
            memory.byte_array.cast("B")[:] = content(seed + number, size)
        return objects

    def free(self, objects: list[Any]) -> None:
        self._manager.free(objects)

    def close(self) -> None:
        self._manager.close()


def content(seed: int, size: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size // 2 + 1, generator=generator).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()[:size]


def data_of(memory: Any) -> bytes:
    return bytes(memory.byte_array)


class Driver:
    """Uses an adapter as LMCache's controllers do: submit, wait for the descriptor, ask."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: list[Any], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        done: dict[int, Any] = {}
        self._wait(
            self.adapter.get_store_event_fd(),
            lambda: done.update(self.adapter.pop_completed_store_tasks()) or (task in done),
        )
        return done[task]

    def lookup(self, keys: list[Any], *, unlock: bool = True) -> list[int]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        found = self._result(
            self.adapter.get_lookup_and_lock_event_fd(), self.adapter.query_lookup_and_lock_result, task
        )
        assert len(found) == len(keys)
        hits = found.get_indices_list()
        if unlock:
            self.adapter.submit_unlock([keys[hit] for hit in hits])
        return list(hits)

    def load(self, keys: list[Any], objects: list[Any]) -> list[int]:
        task = self.adapter.submit_load_task(keys, objects)
        found = self._result(self.adapter.get_load_event_fd(), self.adapter.query_load_result, task)
        assert len(found) == len(keys)
        return list(found.get_indices_list())

    def counters(self) -> dict[str, int]:
        return dict(self.adapter.report_status()["counters"])

    def _result(self, descriptor: int, query: Callable[[int], Any], task: int) -> Any:
        results: list[Any] = []

        def is_ready() -> bool:
            result = query(task)
            if result is not None:
                results.append(result)
            return result is not None

        self._wait(descriptor, is_ready)
        assert query(task) is None, "a result is given once"
        return results[0]

    @staticmethod
    def _wait(descriptor: int, is_ready: Callable[[], bool], timeout_s: float = 60) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        end = time.monotonic() + timeout_s
        while not is_ready():
            assert time.monotonic() < end, "no result"
            if poll.poll(500):
                consume_fd(descriptor)


def until(is_so: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def plugin(root: Path, **params: Any) -> dict[str, Any]:
    """The adapter as LMCache's configuration names it."""
    return {
        "type": "plugin",
        "module_path": "kvpersist_l2.adapter",
        "class_name": "KvPersistL2Adapter",
        "adapter_params": {"root": str(root), "capacity_bytes": 1 << 30, "min_free_bytes": 0, **params},
        "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1},
    }


def storage_manager(adapter: dict[str, Any], watermark: float = 0.9) -> StorageManager:
    """LMCache's two tiers and everything that moves objects between them, without a server."""
    adapter["eviction"]["trigger_watermark"] = watermark
    arguments = ["--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
    return StorageManager(parse_args([*arguments, "--l2-adapter", json.dumps(adapter)]))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """One `lmcache server`.

    Args:
        log: the file that its output goes to.
        adapter: its L2 adapter, None for none.
        before: a command that runs it, with the arguments that come before its own.
    """

    def __init__(self, log: Path, adapter: dict[str, Any] | None, before: tuple[str, ...] = ()) -> None:
        self.port, self.http_port = free_port(), free_port()
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *before,
                    *(sys.executable, "-m", "lmcache.cli.main", "server"),
                    *("--host", "127.0.0.1", "--port", str(self.port)),
                    *("--http-host", "127.0.0.1", "--http-port", str(self.http_port)),
                    *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--chunk-size", str(CHUNK)),
                    *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
                    *(("--l2-adapter", json.dumps(adapter)) if adapter else ()),
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

    def get(self, path: str, data: bytes | None = None) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", data, timeout=10) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        """Waits until it answers."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/status")
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def status(self) -> dict[str, Any]:
        """What its adapter reports."""
        (adapter,) = json.loads(self.get("/status"))["storage_manager"]["l2_adapters"]
        return dict(adapter)

    def forget(self) -> None:
        """Empties the first tier, so that what is asked for next comes from disk."""
        until(self._is_at_rest)
        self.get("/cache/clear", b"")

    def _is_at_rest(self) -> bool:
        manager = json.loads(self.get("/status"))["storage_manager"]
        stores = manager["store_controller"]
        locked = sum(manager["l1_manager"][f"{kind}_locked_count"] for kind in ("read", "write"))
        return not (stores["pending_keys_count"] or stores["in_flight_task_count"] or locked)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Client:
    """A worker of an engine that has computed a few prompts of two chunks each.

    It talks to a server through LMCache's own client and transfer context, which an engine on CPUs uses too.

    Args:
        server: a server that answers.
        prompts: how many prompts.
        dtype: that of its KV.
    """

    CHUNKS = 2
    OBJECT = 2 * 2 * CHUNK * 4 * 64 * 2  # two layers, K and V, four heads of 64 elements of two bytes

    def __init__(self, server: Server, prompts: int, dtype: str = "bfloat16") -> None:
        from lmcache.cli.commands.bench.server_bench import client, config, helpers

        helpers._MODEL_NAME = f"/models/mimo/{NAMESPACE}"  # where that client takes it from
        self._server = server
        self._requests = 0
        blocks = (prompts + 1) * self.CHUNKS * CHUNK // 16
        self._bench = client.ServerBenchClient(
            config.BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{server.port}",
                http_url="",
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=self.CHUNKS * CHUNK,
                kvcache_shape_spec=f"(2,{blocks},16,4,64):{dtype}:2",
                num_blocks=blocks,
                block_size=16,
            ),
            lambda line: None,
        )
        self._bench.start()
        self._caches = list(self._bench._workers[0].kv_caches.values())
        self._computed = [cache.clone() for cache in self._caches]

    def ask(self, prompt: int) -> int:
        """Sends a prompt: takes what the server has, checks every byte of it, computes and stores the rest.

        Returns:
            How many chunks the server had.
        """
        bench = self._bench
        self._requests += 1
        request = bench.create_request(prompt, f"{id(self)}-{self._requests}", "")
        assert request is not None
        everything = self.CHUNKS * CHUNK
        self._compute()
        expected = bench.compute_checksums(request, 0, everything)
        answer = bench.lookup(request)
        assert answer.succeeded
        cached = answer.hit_chunks * CHUNK
        bench.zero_destination(request, 0, everything)
        retrieved = bench.retrieve(request, 0, cached)
        assert retrieved is None or retrieved.succeeded
        served = bench.compute_checksums(request, 0, cached) or []
        assert served == (expected or [])[: answer.hit_chunks], "the server served other bytes"
        self._compute()
        stored = bench.store(request, cached, everything - cached)
        assert stored is None or stored.succeeded
        bench.end_session(request)
        return answer.hit_chunks

    def close(self) -> None:
        self._bench.close()

    def _compute(self) -> None:
        for cache, computed in zip(self._caches, self._computed):
            cache.copy_(computed)
