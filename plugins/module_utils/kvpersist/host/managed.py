"""Files and links that Ansible modules manage: plan first, apply second, report both ways the same."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from .files import link_atomic, link_target, reason, write_atomic

_MODE = 0o600


@dataclass(frozen=True)
class Change:
    """What a run does, or in check mode would do, to one path."""

    path: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """Whether anything differs."""
        return self.before != self.after

    def diff(self) -> dict[str, str]:
        """Ansible's diff entry."""
        return {"before": self.before, "after": self.after, "before_header": self.path, "after_header": self.path}

    def as_result(self) -> dict[str, Any]:
        """``changed`` and ``diff`` of a module's result."""
        return {"changed": self.changed, "diff": self.diff()}


def manage_file(path: str, content: str, check_mode: bool) -> Change:
    """Makes a file have this content and mode 0600.

    Raises:
        UsageError: when the file cannot be read or written.
    """
    exists = os.path.lexists(path)
    before = _content(path) if exists else ""
    mode = stat.S_IMODE(os.stat(path).st_mode) if exists else _MODE
    change = Change(path, before if mode == _MODE else f"# mode {mode:04o}\n{before}", content)
    if change.changed and not check_mode:
        write_atomic(path, content, _MODE)
    return change


def _content(path: str) -> str:
    """What stands in a file, readable or not: a damaged one is replaced like any other."""
    if os.path.isdir(path):
        raise UsageError(f"writing {path}", "a folder stands there", "Move it away.")
    try:
        return Path(path).read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"reading {path}", reason(error), "Check its permissions.") from None


def manage_allocated_file(path: str, size: int, check_mode: bool) -> Change:
    """Makes a file have this size and mode 0600, with all its blocks allocated; what it holds up to there stays.

    Raises:
        UsageError: when something else stands there, the disk is too full, or it cannot be made.
    """
    try:
        status: os.stat_result | None = os.lstat(path)
    except FileNotFoundError:
        status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise UsageError(f"allocating {path}", "something that is not a file stands there", "Move it away.")
    before = _extent(status.st_size, stat.S_IMODE(status.st_mode)) if status is not None else ""
    change = Change(path, before, _extent(size, _MODE))
    if change.changed and not check_mode:
        try:
            _allocate(path, size, status.st_size if status is not None else None)
        except OSError as error:
            fix = "Check the folder and the space on its disk."
            raise UsageError(f"allocating {size} bytes as {path}", reason(error), fix) from None
    return change


def _extent(size: int, mode: int) -> str:
    return f"{size} bytes, mode {mode:04o}\n"


def _allocate(path: str, size: int, before: int | None) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        os.fchmod(descriptor, _MODE)
        if before is not None and before > size:
            os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        # As it was: a size that is right says that every block is there.
        if before is None:
            os.unlink(path)
        elif before < size:
            os.ftruncate(descriptor, before)
        raise
    finally:
        os.close(descriptor)


def manage_link(path: str, target: str, check_mode: bool) -> Change:
    """Makes a symbolic link point to a target.

    Raises:
        UsageError: when something that is not a link stands there, or it cannot be made.
    """
    if os.path.lexists(path) and not os.path.islink(path):
        raise UsageError(f"linking {path}", "something that is not a link stands there", "Move it away.")
    before = link_target(path)
    change = Change(path, f"{before}\n" if before else "", f"{target}\n")
    if change.changed and not check_mode:
        try:
            link_atomic(path, target)
        except OSError as error:
            raise UsageError(f"linking {path}", reason(error), "Check the folder and its permissions.") from None
    return change
