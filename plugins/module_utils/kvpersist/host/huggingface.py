"""What the download from Hugging Face left beside a model's files: their commit, and the SHA-256 of the large ones.

Both layouts are those of huggingface_hub 2.4.0: ``.cache/huggingface/download/<name>.metadata`` in a local folder
(``_local_folder.py``: commit, ETag, time, a line each), and links from ``snapshots/<commit>`` to ``blobs/<ETag>`` in
the cache (``file_download.py``). The ETag of a large file is its SHA-256, that of a small one a git hash.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import UsageError
from ..core.identity import HEX40, HEX64
from .files import reason

_METADATA = re.compile(rb"([0-9a-f]{40})\r?\n([0-9a-f]{40,64})\r?\n")


@dataclass(frozen=True)
class Download:
    """What is known of a model's files from their download.

    Attributes:
        expected: SHA-256 by file name, of those files for which it is known.
        commit: the commit that all of them name, if the SHA-256 of every one is known; else None.
    """

    expected: Mapping[str, str]
    commit: str | None


def read_download(folder: str, names: Sequence[str]) -> Download:
    """What the download says about some files of a model folder.

    Raises:
        UsageError: when metadata is there and may not be read. Damaged metadata says nothing.
    """
    commits: set[str] = set()
    expected: dict[str, str] = {}
    for name in names:
        commit, etag = _metadata(folder, name) or _snapshot(folder, name) or ("", "")
        if HEX64.match(etag):
            expected[name] = etag
            commits.add(commit)
    whole = len(expected) == len(names) and len(commits) == 1
    return Download(expected, commits.pop() if whole else None)


def _metadata(folder: str, name: str) -> tuple[str, str] | None:
    path = f"{folder}/.cache/huggingface/download/{name}.metadata"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            match = _METADATA.match(file.read(256))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"reading {path}", reason(error), "Let this user read it, since the identity depends on it."
        ) from None
    return (match[1].decode(), match[2].decode()) if match else None


def _snapshot(folder: str, name: str) -> tuple[str, str] | None:
    try:
        blobs, etag = os.path.split(os.readlink(f"{folder}/{name}"))
    except OSError:
        return None  # no link
    snapshots, commit = os.path.split(os.path.realpath(folder))
    if os.path.basename(blobs) == "blobs" and os.path.basename(snapshots) == "snapshots" and HEX40.match(commit):
        return commit, etag
    return None
