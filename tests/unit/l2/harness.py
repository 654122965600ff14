"""What the tests of the disk tier without LMCache share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvpersist.core.frames import FrameKey
from kvpersist_l2.frame_io import Memory
from kvpersist_l2.params import Params
from kvpersist_l2.tier import Stored, Tier

NAMESPACE = "kvp-" + "7" * 32
MODEL = f"/models/{NAMESPACE}"
# What crashing processes work on.
CAPACITY = 3_000_000
OBJECTS = 40


def key(number: object, scope: str = NAMESPACE, salt: str = "") -> FrameKey:
    return FrameKey(scope, 0x01000100, 0, hashlib.sha256(repr(number).encode()).digest(), salt)


def size_of(number: int) -> int:
    return 50_000 + number * 5_001


def content(frame_key: FrameKey, size: int) -> bytes:
    """Half of it compressible, as KV is."""
    generator = random.Random(frame_key.chunk_hash)
    low = generator.randbytes(size // 2 + 1)
    out = bytearray(size)
    out[0::2] = low[: (size + 1) // 2]
    out[1::2] = bytes(0x3C + (byte & 3) for byte in low[: size // 2])
    return bytes(out)


def memory(data: bytes) -> Memory:
    """Page-aligned, as LMCache's is."""
    area = mmap.mmap(-1, max(1, len(data)))
    area[:] = data or b"\0"
    return Memory(memoryview(area)[: len(data)], 2, 0xBF16, True)


class TierDriver:
    """A tier with the deadlines and handles that tests do not care about."""

    def __init__(self, root: Path, **params: Any) -> None:
        values = {"capacity_bytes": 1 << 30, "min_free_bytes": 0, **params}
        self.removed: list[Any] = []
        self.warnings: list[str] = []
        self.tier = Tier(
            Params(root=str(root), **values),
            lambda frame_key, model: (frame_key, model),
            self.removed.append,
            self.warnings.append,
        )

    def store(self, frame_key: FrameKey, data: bytes, model: str = MODEL) -> Stored:
        return self.tier.store(
            frame_key, (frame_key, model), model, memory(data), time.time_ns(), time.monotonic() + 60
        )

    def load(self, frame_key: FrameKey, size: int) -> bytes | None:
        target = memory(bytes(size))
        return bytes(target.data) if self.tier.load(frame_key, target, time.monotonic() + 60) else None

    def delete(self, frame_key: FrameKey) -> bool:
        entry = self.tier.delete(frame_key)
        self.tier.settle([frame_key])
        return entry is not None

    def counters(self) -> dict[str, int]:
        return self.tier.counters.values()

    def close(self) -> None:
        self.tier.close()


def command(what: str, root: Path, before: Sequence[str] = (), *rest: str) -> dict[str, Any]:
    """A process of process.py, as :mod:`subprocess` wants it, behind a command that runs it."""
    return {
        "args": [*before, sys.executable, str(Path(__file__).with_name("process.py")), what, str(root), *rest],
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        "text": True,
    }


@contextlib.contextmanager
def running(
    what: str, root: Path, *rest: str, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process of process.py, and what it says when it is ready."""
    process = subprocess.Popen(**command(what, root, before, *rest), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.stdout.read()  # the end of a namespace's processes too, of which the one above is only the parent
        process.wait()
