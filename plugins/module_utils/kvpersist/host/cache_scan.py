"""What lies below a cache root: objects, temporary files, what is damaged at first sight. Reads, changes nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core import layout
from ..core.frames import PAGE, FrameError, FrameKey, Header, parse_header, whole_pages

_MODEL_FILE_BYTES = 65536


class StoredObject(NamedTuple):
    """One object on disk.

    Args:
        used_ns: time of its last use, nanoseconds since the epoch.
        key: the key in its name, salt included.
        size: bytes of its file.
        model_name: the model name that LMCache last used for its folder.
    """

    used_ns: int
    key: FrameKey
    size: int
    model_name: str


class OtherFile(NamedTuple):
    """A file that is no object.

    Args:
        path: relative to the root.
        size: bytes of the whole pages it occupies.
        modified_s: time of its last change, seconds since the epoch.
    """

    path: str
    size: int
    modified_s: float


@dataclass
class CacheContent:
    """What a scan found.

    Args:
        objects: objects, in no order.
        temporary: files that a writer has begun.
        damaged: what has an object's name and cannot be a frame: cut files, folders, links.
        unknown: files in object folders that are none of these, and objects whose key cannot be told.
        quarantined: files in the quarantine, oldest first.
        leftovers: paths of empty folders and of what a killed server had not finished writing beside its objects.
        model_names: model name by folder.
    """

    objects: list[StoredObject] = field(default_factory=list)
    temporary: list[OtherFile] = field(default_factory=list)
    damaged: list[OtherFile] = field(default_factory=list)
    unknown: list[OtherFile] = field(default_factory=list)
    quarantined: list[OtherFile] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    model_names: dict[str, str] = field(default_factory=dict)


def scan(root: str) -> CacheContent:
    """Lists everything below a cache root.

    Raises:
        OSError: when the root cannot be listed. What vanishes during the scan is left out.
    """
    content = CacheContent()
    folders = []
    with os.scandir(root) as entries:
        for entry in entries:
            if _is_folder(entry) and layout.is_object_folder(entry.name):
                folders.append(entry.name)
            elif layout.is_unfinished(entry.name):
                content.leftovers.append(entry.name)
            elif not entry.name.startswith("."):  # our own files start with a dot
                # Of another adapter or of somebody: it takes room under the cap, whoever wrote it.
                size = path_size(entry.path)
                if size:
                    content.unknown.append(OtherFile(entry.name, size, entry.stat(follow_symlinks=False).st_mtime))
    salts: dict[str | None, str] = {None: ""}
    for folder in sorted(folders):
        _scan_folder(root, folder, salts, content)
    content.quarantined = sorted(_quarantined(root))
    return content


def path_size(path: str) -> int:
    """Bytes of the whole pages that a file, or everything below a folder, occupies; 0 where there is nothing."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    if not stat.S_ISDIR(status.st_mode):
        return whole_pages(status.st_size)
    try:
        names = os.listdir(path)
    except OSError:
        return 0
    return sum(path_size(os.path.join(path, name)) for name in names)


def read_header(path: str) -> Header | None:
    """The header page of a frame, its payload unread; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return parse_header(os.pread(descriptor, PAGE, 0), os.fstat(descriptor).st_size)
    except (OSError, FrameError):
        return None
    finally:
        os.close(descriptor)


def _scan_folder(root: str, folder: str, salts: dict[str | None, str], content: CacheContent) -> None:
    path = os.path.join(root, folder)
    model_name = _model_name(path, folder)
    if model_name is not None:
        content.model_names[folder] = model_name
    scope = layout.scope(model_name) if model_name is not None else None
    parse, whole = layout.parse_object_name, _is_whole
    add = content.objects.append
    for shard, entry, status in _files(path, folder, content):
        name = entry.name
        parsed = parse(name)
        if parsed is None:
            other = OtherFile(f"{folder}/{shard}/{name}", whole_pages(status.st_size), status.st_mtime)
            target = content.temporary if layout.parse_temporary_name(name) else content.unknown
            target.append(other)
            continue
        rank, group, chunk_hash, digest = parsed
        relative = f"{folder}/{shard}/{name}"
        if not whole(status) or chunk_hash[:1].hex() != shard:
            content.damaged.append(OtherFile(relative, path_size(os.path.join(root, relative)), status.st_mtime))
            continue
        salt = salts.get(digest)
        if salt is None or scope is None:
            header = read_header(os.path.join(root, relative))
            if header is not None and layout.object_path(header.key) == relative:
                salt = salts[digest] = header.key.cache_salt
                scope = model_name = header.key.scope if scope is None else scope
                content.model_names.setdefault(folder, model_name)
        if salt is None or scope is None or model_name is None:
            content.unknown.append(OtherFile(relative, whole_pages(status.st_size), status.st_mtime))
            continue
        key = FrameKey(scope, rank, group, chunk_hash, salt)
        add(StoredObject(status.st_mtime_ns, key, status.st_size, model_name))


def _files(path: str, folder: str, content: CacheContent) -> Iterator[tuple[str, os.DirEntry[str], os.stat_result]]:
    names = []
    with os.scandir(path) as shards:
        for entry in shards:
            relative = f"{folder}/{entry.name}"
            if _is_folder(entry) and layout.is_shard(entry.name):
                names.append(entry.name)
            elif layout.is_unfinished(entry.name):
                content.leftovers.append(relative)
            elif entry.name != layout.MODEL_FILE:
                modified = entry.stat(follow_symlinks=False).st_mtime
                content.unknown.append(OtherFile(relative, path_size(entry.path), modified))
    for shard in names:
        is_empty = True
        with os.scandir(os.path.join(path, shard)) as entries:
            for entry in entries:
                is_empty = False
                try:
                    yield shard, entry, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
        if is_empty:
            content.leftovers.append(f"{folder}/{shard}")


def _model_name(path: str, folder: str) -> str | None:
    try:
        with open(os.path.join(path, layout.MODEL_FILE), encoding="utf-8", errors="replace") as file:
            name = layout.parse_model_file(file.read(_MODEL_FILE_BYTES), folder)
    except OSError:
        name = None
    # Without the file a namespace still names itself; the model's path is then unknown, which the key does not need.
    return name if name is not None or layout.folder(folder) != folder else folder


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _is_whole(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size >= 2 * PAGE and status.st_size % PAGE == 0


def _quarantined(root: str) -> Iterator[OtherFile]:
    path = os.path.join(root, layout.QUARANTINE_FOLDER)
    for name in os.listdir(path) if os.path.isdir(path) else ():
        try:
            modified = os.lstat(os.path.join(path, name)).st_mtime
        except FileNotFoundError:
            continue
        yield OtherFile(f"{layout.QUARANTINE_FOLDER}/{name}", path_size(os.path.join(path, name)), modified)
