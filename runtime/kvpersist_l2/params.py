"""Parameters of the adapter: what stands under ``adapter_params`` in its JSON."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpersist.core.errors import UsageError

_CHOICES = {
    "codec": ("none", "zstd", "lz4"),
    "fsync": ("none", "data", "full"),
    "io": ("auto", "buffered", "direct"),
    "admission": ("always", "second-hit"),
}
_DOING = "reading adapter_params"


@dataclass(frozen=True)
class Params:
    """Parameters of one adapter.

    Args:
        root: the cache root, an absolute path on a local filesystem; made with mode 0700 where it is missing.
        capacity_bytes: hard cap in bytes over objects, files being written, residue and quarantine.
        min_free_bytes: bytes of the filesystem that stores leave free.
        codec: lossless codec of new objects: none, zstd, lz4. Objects of other codecs are read by their own header.
        fsync: none, data (file content before the rename), full (also the folder after it).
        io: auto (from the page cache where it is there, else the way that is faster on this disk), buffered, direct.
        threads: threads for reads and writes; 0 chooses by the number of CPUs.
        admission: always, or second-hit: an object is written when it is offered the second time within the window.
        admission_window_s: seconds within which an object must be offered again.
        quarantine_bytes: bytes of damaged files kept for inspection; 0 keeps a fiftieth of the capacity.
        pin_ttl_s: seconds after which a lookup's pin lapses, since an aborted request never unlocks.
        result_ttl_s: seconds after which a result that nobody asks for is dropped.
        store_deadline_s: seconds from a store's submission to its end; below LMCache's read lock (300 s by default),
            after which the memory may hold another object.
        load_deadline_s: the same for loads; below LMCache's write lock (600 s by default).
        close_timeout_s: seconds that closing waits for queued stores before it drops them.
    """

    root: str
    capacity_bytes: int
    min_free_bytes: int = 1_000_000_000
    codec: str = "none"
    fsync: str = "none"
    io: str = "auto"
    threads: int = 0
    admission: str = "always"
    admission_window_s: int = 86_400
    quarantine_bytes: int = 0
    pin_ttl_s: int = 600
    result_ttl_s: int = 600
    store_deadline_s: int = 240
    load_deadline_s: int = 480
    close_timeout_s: int = 30

    def thread_count(self) -> int:
        """Threads to start."""
        # A thread mostly waits for the device, which wants many requests at once; the pool sees to it that no more
        # compute than there are CPUs.
        return self.threads or min(32, max(16, os.cpu_count() or 16))

    def quarantine_limit(self) -> int:
        """Bytes of damaged files to keep."""
        return self.quarantine_bytes or self.capacity_bytes // 50


def parse_params(values: Mapping[str, Any]) -> Params:
    """Checks the JSON object under ``adapter_params``.

    Raises:
        UsageError: for a missing or unknown name, a wrong type or a value out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(Params)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UsageError(_DOING, f"{', '.join(unknown)}: no such parameter", f"Use {', '.join(fields)}.")
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                raise UsageError(_DOING, f"{name} is missing", f"Set {name}.")
            continue
        _check(name, values[name], int if field.type == "int" else str)
    params = Params(**values)
    if params.capacity_bytes <= 0:
        raise UsageError(_DOING, "capacity_bytes is 0", "Give the disk budget in bytes.")
    if not os.path.isabs(params.root) or os.path.normpath(params.root) == "/":
        raise UsageError(_DOING, f"root is {params.root!r}", "Give an absolute path of a folder of its own.")
    return params


def _check(name: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise UsageError(_DOING, f"{name} is {value!r}", f"Give {'a whole number' if kind is int else 'a text'}.")
    if isinstance(value, int) and value < 0:
        raise UsageError(_DOING, f"{name} is {value}", "Give a number from 0 up.")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise UsageError(_DOING, f"{name} is {value!r}", f"Use one of {', '.join(_CHOICES[name])}.")
