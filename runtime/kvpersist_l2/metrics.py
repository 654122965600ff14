"""The adapters' figures among LMCache's metrics, through the same OpenTelemetry meter provider.

Names follow LMCache's (lmcache 0.5.6, ``v1/mp_observability/otel_init.py``); on its ``/metrics`` dots become
underscores.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, Protocol


class _Adapter(Protocol):
    def report_status(self) -> dict[str, Any]: ...


_lock = threading.Lock()
_adapters: weakref.WeakSet[_Adapter] = weakref.WeakSet()
_is_registered = False
# One scrape asks for each metric apart; they should agree, and cost one look.
_SAME_SCRAPE_S = 1.0
_seen: tuple[float, list[dict[str, Any]]] = (0.0, [])

_GAUGES = {
    "used_bytes": "Bytes that count against the cap",
    "capacity_bytes": "The hard cap in bytes",
    "objects": "Objects on disk",
    "disk_free_bytes": "Free bytes of the filesystem",
    "writing_bytes": "Bytes reserved by stores that run",
    "pinned_objects": "Objects that a request has pinned",
    "queued_loads": "Loads that wait for a thread",
    "queued_stores": "Stores that wait for a thread",
}


def register(adapter: _Adapter) -> None:
    """Adds an adapter's figures to the metrics; nothing where OpenTelemetry is not installed."""
    global _is_registered
    with _lock:
        _adapters.add(adapter)
        if _is_registered:
            return
        _is_registered = True
    try:
        from opentelemetry import metrics
    except ImportError:
        return
    meter = metrics.get_meter("kvpersist.l2")
    for name, description in _GAUGES.items():
        meter.create_observable_gauge(
            f"kvpersist_l2.{name}", callbacks=[_gauge(name, metrics.Observation)], description=description
        )
    meter.create_observable_counter(
        "kvpersist_l2.events",
        callbacks=[_events(metrics.Observation)],
        description="What the adapter counts, by the label event; names that end in _bytes count bytes",
    )


def unregister(adapter: _Adapter) -> None:
    """Takes an adapter's figures out again."""
    with _lock:
        _adapters.discard(adapter)


def _statuses() -> list[dict[str, Any]]:
    global _seen
    with _lock:
        now = time.monotonic()
        if now - _seen[0] > _SAME_SCRAPE_S:
            _seen = (now, [adapter.report_status() for adapter in _adapters])
        return _seen[1]


def _gauge(name: str, observation: Any) -> Any:
    def observe(_options: object) -> Iterable[Any]:
        return [observation(status[name], {"root": status["root"]}) for status in _statuses()]

    return observe


def _events(observation: Any) -> Any:
    def observe(_options: object) -> Iterable[Any]:
        return [
            observation(value, {"root": status["root"], "event": event})
            for status in _statuses()
            for event, value in status["counters"].items()
        ]

    return observe
