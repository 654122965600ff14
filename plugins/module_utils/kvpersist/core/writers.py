"""Which temporary files may be removed: what is known of their writers, and what follows from it.

A writer registers a marker before its first temporary file and removes it after its last. Its temporary files carry its
id. What cannot be decided is kept.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import asdict, dataclass

HEARTBEAT_S = 30.0
ALIVE_S = 120.0
DEAD_MARKER_S = 3600.0
UNREGISTERED_S = 900.0

_WRITER = re.compile(r"[0-9a-f]{32}\Z")


class Liveness(enum.Enum):
    """Whether a writer still runs."""

    LIVE = "live"
    DEAD = "dead"
    UNDECIDABLE = "undecidable"


class Found(enum.Enum):
    """What a look for a writer's pid in the own PID namespace found."""

    SAME = "the process that registered"
    OTHER = "no process, or a later one with the same pid"
    UNKNOWN = "a process that may not be looked at"


@dataclass(frozen=True)
class Marker:
    """How a writer registers.

    Args:
        writer: its id, 32 hex digits, also in the names of its temporary files.
        pid: its pid in its own PID namespace.
        start_ticks: its start time in clock ticks since boot, which tells it from a later process with its pid.
        pid_namespace: its PID namespace, as ``/proc/self/ns/pid`` names it.
        boot_id: the boot it belongs to; PID namespaces are numbered anew at each.
        host: its host name, for people.
    """

    writer: str
    pid: int
    start_ticks: int
    pid_namespace: str
    boot_id: str
    host: str

    def render(self) -> str:
        """The marker file's content."""
        return json.dumps(asdict(self), sort_keys=True) + "\n"


def parse_marker(text: str) -> Marker | None:
    """Reads a marker file, None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or set(value) != set(Marker.__dataclass_fields__):
        return None
    numbers = all(type(value[name]) is int and value[name] > 0 for name in ("pid", "start_ticks"))
    texts = all(isinstance(value[name], str) for name in ("writer", "pid_namespace", "boot_id", "host"))
    if not (numbers and texts and _WRITER.match(value["writer"])):
        return None
    return Marker(**value)


def is_observable(marker: Marker, own: Marker) -> bool:
    """Whether a writer's pid means the same process to its observer as to itself."""
    return (marker.boot_id, marker.pid_namespace) == (own.boot_id, own.pid_namespace)


def liveness(marker: Marker | None, found: Found | None, heartbeat_age_s: float) -> Liveness:
    """Whether a registered writer still runs.

    Args:
        marker: None where its file cannot be read.
        found: what the look for its pid found; None where it :func:`is_observable` is false.
        heartbeat_age_s: seconds since its last heartbeat; negative where its clock is ahead.
    """
    if marker is None or found is Found.UNKNOWN:
        return Liveness.UNDECIDABLE
    if found is not None:
        return Liveness.LIVE if found is Found.SAME else Liveness.DEAD
    if heartbeat_age_s < -ALIVE_S:
        return Liveness.UNDECIDABLE  # no clock is off by that much and right about the heartbeat
    return Liveness.LIVE if heartbeat_age_s <= ALIVE_S else Liveness.DEAD


def may_remove_temporary(writer: Liveness | None, age_s: float) -> bool:
    """Whether a temporary file is residue.

    Args:
        writer: state of the writer in its name; None where that is not registered.
        age_s: seconds since it was last written to; negative where the clock went back.
    """
    if writer is None:
        return age_s > UNREGISTERED_S
    return writer is Liveness.DEAD


def may_remove_marker(writer: Liveness, heartbeat_age_s: float) -> bool:
    """Whether a marker of a dead writer has been kept long enough."""
    return writer is Liveness.DEAD and heartbeat_age_s > DEAD_MARKER_S
