"""Processes as /proc shows them: who listens on a port, with which arguments, since when."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True)
class Process:
    """One running process. ``start_ticks`` tells it from a later one with the same pid."""

    pid: int
    start_ticks: int


def process(pid: int) -> Process | None:
    """The process with this pid, or None where there is none (a zombie is none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name may hold spaces and parentheses; what follows the last ')' is fixed (proc_pid_stat(5)).
    fields = stat[stat.rfind(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else Process(pid, int(fields[19]))


def command_line(pid: int) -> list[str] | None:
    """Arguments of a process, or None where they cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # Each argument ends in a NUL, an empty last one too.
    return raw.decode("utf-8", "replace").removesuffix("\0").split("\0") if raw else None


def environment(pid: int) -> dict[str, str]:
    """Environment that a process was started with; empty where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode("utf-8", "replace").split("\0") if entry)
    return {name: value for name, _, value in pairs}


def processes() -> list[int]:
    """Pids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def visible_path(pid: int, path: str) -> str | None:
    """A path of a process, seen from here: for a container, inside its root. None where that may not be looked at."""
    try:
        root = os.readlink(f"/proc/{pid}/root")
    except OSError:
        return None
    return path if root == "/" else f"/proc/{pid}/root{path}"


def listener(port: int) -> int | None:
    """Pid of the process that listens on a TCP port; None where nobody listens or the owner cannot be seen."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for entry in sorted(os.listdir("/proc")):
        if entry.isdigit() and _holds(int(entry), targets):
            return int(entry)
    return None


def port_is_taken(port: int) -> bool:
    """Whether any process of any user listens on a TCP port."""
    return bool(_listening_inodes(port))


def connects(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether a TCP connection succeeds."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether a process is another one or was started, directly or not, by it."""
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        pid = int(stat[stat.rfind(")") + 2 :].split()[1])
    return False


def storage_read_bytes(pid: int) -> int | None:
    """Bytes that a process caused to be fetched from storage, or None where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/io").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else None


def block_device(path: str) -> str | None:
    """Name of the block device behind a folder, e.g. ``nvme0n1p1``; None where there is none (overlay, tmpfs)."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return None  # no such folder yet
    link = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    return os.path.basename(os.path.realpath(link)) if os.path.exists(link) else None


def device_read_bytes(name: str) -> int | None:
    """Bytes a block device has read since it appeared; None where it has no counters."""
    try:
        text = Path(f"/sys/class/block/{os.path.basename(name)}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(text.split()[2]) * 512  # sectors of 512 bytes, whatever the device's own (Documentation/block/stat)


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _LISTEN and int(columns[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(columns[9])
    return inodes


def _holds(pid: int, targets: set[str]) -> bool:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.readlink(f"/proc/{pid}/fd/{descriptor}") in targets:
                return True
        except OSError:
            continue
    return False
