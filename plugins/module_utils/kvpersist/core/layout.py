"""Where objects lie below a cache root, and how their names are made and read back.

``<root>/<folder>/<2 hex of the chunk hash>/<object>.bin``, where the folder is the namespace or, for a model name that
ends in none, ``x-`` and a hash of it. No name comes near the 255 bytes that filesystems allow, whatever the model name
and the salt. The path before a namespace is no part of it: the same model folder is seen under different paths by a
host and a container.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from typing import NamedTuple

from .frames import FrameKey
from .identity import NAMESPACE_PATTERN

QUARANTINE_FOLDER = ".quarantine"
WRITERS_FOLDER = ".writers"
LOCK_FILE = ".lock"
WRITTEN_FILE = ".written.json"
ADMISSION_FILE = ".admission"
READ_RATES_FILE = ".read-rates.json"
# In each folder of objects: the model name that LMCache last used for it, from which its keys are rebuilt.
MODEL_FILE = ".model.json"

_FOREIGN_PREFIX = "x-"
_FOLDER = re.compile(r"(?:kvp|x)-[0-9a-f]{32}\Z")
_SHARD = re.compile(r"[0-9a-f]{2}\Z")
_OBJECT = re.compile(r"([0-9a-f]{8,16})-([0-9a-f]{1,8})-((?:[0-9a-f]{2}){1,64})(?:-([0-9a-f]{32}))?\.bin\Z")
_TEMPORARY = re.compile(r"(.+\.bin)\.tmp\.([0-9a-f]{32})\Z")


class ObjectName(NamedTuple):
    """What an object's file name says.

    Args:
        salt_digest: digest of the cache salt, None where there is no salt. The salt itself is in the frame.
    """

    kv_rank: int
    object_group: int
    chunk_hash: bytes
    salt_digest: str | None


@functools.lru_cache(maxsize=1024)
def scope(model_name: str) -> str:
    """The namespace that a model name ends in, or the model name itself."""
    last = model_name.rstrip("/").rpartition("/")[2]
    return last if NAMESPACE_PATTERN.match(last) else model_name


@functools.lru_cache(maxsize=1024)
def folder(key_scope: str) -> str:
    """Name of the folder that holds the objects of a scope."""
    if NAMESPACE_PATTERN.match(key_scope):
        return key_scope
    return _FOREIGN_PREFIX + hashlib.sha256(key_scope.encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1024)
def salt_digest(salt: str) -> str | None:
    """The part of an object's name that stands for its cache salt, None for no salt."""
    return hashlib.sha256(salt.encode()).hexdigest()[:32] if salt else None


def object_name(key: FrameKey) -> str:
    """File name of an object."""
    digest = salt_digest(key.cache_salt)
    tail = f"-{digest}" if digest else ""
    return f"{key.kv_rank:08x}-{key.object_group:x}-{key.chunk_hash.hex()}{tail}.bin"


def object_path(key: FrameKey) -> str:
    """Path of an object, relative to the root."""
    return f"{folder(key.scope)}/{key.chunk_hash[:1].hex()}/{object_name(key)}"


def parse_object_name(name: str) -> ObjectName | None:
    """Reads an object's file name, None for any other file."""
    match = _OBJECT.match(name)
    if match is None:
        return None
    rank, group, chunk_hash, digest = match.groups()
    if (len(rank) > 8 and rank[0] == "0") or (len(group) > 1 and group[0] == "0"):
        return None  # not as object_name writes it: two names would stand for one key
    return ObjectName(int(rank, 16), int(group, 16), bytes.fromhex(chunk_hash), digest)


def temporary_path(path: str, writer: str) -> str:
    """Path of the file that a writer fills before it renames it to ``path``.

    Args:
        writer: id of the writer, 32 hex digits. It writes an object once at a time, so the name is its own.
    """
    return f"{path}.tmp.{writer}"


def parse_temporary_name(name: str) -> str | None:
    """Id of the writer of a temporary file, None for any other file."""
    match = _TEMPORARY.match(name)
    return match.group(2) if match else None


def is_unfinished(name: str) -> bool:
    """Whether a file is one of ours that is written beside its name first: ours start with a dot, and get another."""
    return name.startswith("..")


def is_object_folder(name: str) -> bool:
    """Whether a folder below the root holds objects."""
    return bool(_FOLDER.match(name))


def is_shard(name: str) -> bool:
    """Whether a folder below an object folder holds objects."""
    return bool(_SHARD.match(name))


def render_model_file(model_name: str) -> str:
    """Content of :data:`MODEL_FILE`."""
    return json.dumps({"model_name": model_name}) + "\n"


def parse_model_file(text: str, folder_name: str) -> str | None:
    """The model name in a :data:`MODEL_FILE`; None where it is none, or does not belong to the folder."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("model_name") if isinstance(value, dict) else None
    return name if isinstance(name, str) and folder(scope(name)) == folder_name else None
