"""Files: read with a clear error, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ..core.errors import UsageError


def read_text(path: str) -> str:
    """Reads a UTF-8 file.

    Raises:
        UsageError: naming the file and why it cannot be read.
    """
    try:
        if not Path(path).is_file() and Path(path).exists():
            raise UsageError(f"reading {path}", "it is no regular file", "Move it away.")  # a pipe would block for ever
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"reading {path}", reason(error), "Check that it exists, is UTF-8 text and may be read."
        ) from None


def read_json(path: str) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        UsageError: naming the file and why it cannot be used.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"reading {path}", f"it is not JSON ({error})", "Copy the file again from its source."
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"reading {path}", "it holds no JSON object", "Copy the file again from its source.")
    return value


def write_atomic(path: str, text: str, mode: int = 0o600) -> None:
    """Writes a file so that a reader sees the old or the new content, also after a crash.

    Args:
        mode: permission bits of the new file; its owner is the caller.

    Raises:
        UsageError: when it cannot be written.
    """
    try:
        _write_atomic(path, text, mode)
    except OSError as error:
        raise UsageError(f"writing {path}", reason(error), "Check the folder, its permissions and the disk.") from None


def _write_atomic(path: str, text: str, mode: int) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{os.path.basename(path)}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def link_target(path: str) -> str | None:
    """Where a symbolic link points, or None where there is no link."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def link_atomic(path: str, target: str) -> None:
    """Makes ``path`` a symbolic link to ``target``, replacing an older link in one step.

    Raises:
        UsageError: when something other than a link stands there; it is left alone.
    """
    if os.path.lexists(path) and not os.path.islink(path):
        raise UsageError(f"linking {path}", "something that is not a link stands there", "Move it away.")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.new"
    if os.path.lexists(temporary):
        os.unlink(temporary)  # of a killed process that had our pid
    os.symlink(target, temporary)
    os.replace(temporary, path)


def tree_bytes(root: str) -> int:
    """Bytes of all finished files below a folder; temporary files of writers are left out."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if ".tmp" in name:
                continue
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue  # evicted while we looked
    return total


def drop_page_cache(root: str) -> None:
    """Makes the next read of every file below a folder come from its device. Needs no privilege."""
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                continue  # evicted while we looked, or not a file
            try:
                os.fsync(descriptor)  # a dirty page cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def reason(error: BaseException) -> str:
    """The cause of an error in words, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
