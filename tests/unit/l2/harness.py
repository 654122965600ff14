"""What the tests of the disk tier without LMCache share."""

from __future__ import annotations

import hashlib
import mmap
import random
import time
from pathlib import Path
from typing import Any

from kvpersist.core.frames import FrameKey
from kvpersist_l2.frame_io import Memory
from kvpersist_l2.params import Params
from kvpersist_l2.tier import Stored, Tier

NAMESPACE = "kvp-" + "7" * 32
MODEL = f"/models/{NAMESPACE}"


def key(number: object, scope: str = NAMESPACE, salt: str = "") -> FrameKey:
    return FrameKey(scope, 0x01000100, 0, hashlib.sha256(repr(number).encode()).digest(), salt)


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
