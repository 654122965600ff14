"""Identities that this host has had, each with the environment files it was deployed with."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from ..core import layout
from ..core.commands import ENGINE_MODULE, served_path
from ..core.deployment import Deployment
from ..core.engine_args import parse_options
from ..core.errors import InconclusiveError, KvpError, UsageError
from ..core.explain import Named, Stored
from ..core.identity import IDENTITY_ENV, NAMESPACE_PATTERN, Identity, identity_from_env
from ..core.settings import FILES, Value, read_files
from .deployment import load_identity
from .files import read_json, read_text, reason, write_atomic
from .processes import command_line, listener

HISTORY = "identities"
_MOST = 50


@dataclass(frozen=True)
class Entry:
    """One identity of the host.

    Attributes:
        namespace: of the identity itself, whatever the operator's override was.
        model_path: the value of ``--model``.
        deployed: when it last became the host's identity, UTC.
        identity: its fields by name.
        sources: how each is known.
        files: content of the environment files, by name.
    """

    namespace: str
    model_path: str
    deployed: str
    identity: Mapping[str, Any]
    sources: Mapping[str, str]
    files: Mapping[str, str]


def entries(state_dir: str) -> tuple[list[Entry], list[str]]:
    """The host's identities, newest first, and the paths of files that hold none."""
    folder = f"{state_dir}/{HISTORY}"
    found, damaged = [], []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.endswith(".json") and not name.startswith("."):
            try:
                found.append(_read(f"{folder}/{name}"))
            except UsageError:
                damaged.append(f"{folder}/{name}")
    return sorted(found, key=lambda entry: entry.deployed, reverse=True), damaged


def find(state_dir: str, namespace: str) -> Entry:
    """One identity of the host.

    Raises:
        UsageError: when the host never had it, or its file is damaged.
    """
    path = _path(state_dir, namespace)
    if not NAMESPACE_PATTERN.match(namespace) or not os.path.exists(path):
        known = ", ".join(entry.namespace for entry in entries(state_dir)[0])
        raise UsageError(
            f"looking for {namespace!r} in this host's history",
            f"no deployment of this host had it (known: {known or 'none'})",
            "Choose one that kvpersist identity history lists.",
        )
    return _read(path)


def remember(deployment: Deployment, identity: Identity, model_path: str, sources: Mapping[str, str]) -> None:
    """Keeps the identity that is being deployed, with the environment files as they are now.

    Nothing is written while it stays the newest one with the same files.

    Raises:
        UsageError: when the state folder cannot be written.
    """
    state_dir, namespace = deployment.state_dir, identity.namespace()
    paths = {name: f"{deployment.config_dir}/{name}" for name in (*FILES, IDENTITY_ENV)}
    now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    entry = Entry(
        namespace=namespace,
        model_path=model_path,
        deployed=now,
        identity=identity.as_dict(),
        sources=dict(sources),
        files={name: read_text(path) for name, path in paths.items() if os.path.exists(path)},
    )
    known, _ = entries(state_dir)
    if known and {**asdict(known[0]), "deployed": now} == asdict(entry):
        return
    write_atomic(_path(state_dir, namespace), json.dumps(asdict(entry), ensure_ascii=False, indent=1) + "\n")
    others = [other for other in known if other.namespace != namespace]
    for other in others[_MOST - 1 :]:
        with contextlib.suppress(OSError):  # tried again by the next deployment
            os.unlink(_path(state_dir, other.namespace))


def settings_of(entry: Entry, config_dir: str) -> dict[str, Value]:
    """Settings of an earlier deployment by Ansible variable, as typed values.

    Args:
        config_dir: where its files are to lie again.

    Raises:
        UsageError: when a file is missing or no longer fits this version's settings.
    """
    missing = [name for name in FILES if name not in entry.files]
    if missing:
        raise UsageError(
            f"reading {entry.namespace} from this host's history",
            f"{', '.join(missing)} was not kept",
            "Choose another.",
        )
    return read_files({name: entry.files[name] for name in FILES}, {}, config_dir)


def named(deployment: Deployment, word: str) -> Named:
    """The identity that a person means.

    Args:
        word: ``current`` (identity.env.local), ``running`` (what the engine was started with), a namespace of this
            host's history, or the path of an identity file.

    Raises:
        UsageError: when there is no such identity.
        InconclusiveError: when what runs cannot be read.
    """
    if word == "current":
        return _current(deployment)
    if word == "running":
        return _running(deployment)
    if os.path.isfile(word):
        identity = identity_from_env(read_text(word), word)
        namespace = identity.namespace()
        return Named(namespace, served_path(deployment.engine, namespace), identity.as_dict())
    return _of_entry(find(deployment.state_dir, word))


def stored_under(root: str, model_path: str) -> Stored | None:
    """What a cache root holds under a model path; None where that cannot be counted.

    This project's adapter has a folder for it; LMCache's own write files side by side whose names hold the namespace.
    """
    scope = layout.scope(model_path)
    path = f"{root}/{layout.folder(scope)}"
    try:
        found = [f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names]
        own = [file for file in found if layout.parse_object_name(os.path.basename(file))]
        remove = f"rm -r {shlex.quote(path)}"
        if not own and NAMESPACE_PATTERN.match(scope) and os.path.isdir(root):
            own = [entry.path for entry in os.scandir(root) if scope in entry.name and entry.is_file()]
            remove = f"rm {shlex.quote(root)}/*{scope}*" if own else remove
        return Stored(len(own), sum(map(_size, own)), remove)
    except OSError:
        return None


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0  # evicted while we looked


def _current(deployment: Deployment) -> Named:
    identity = load_identity(deployment.config_dir)
    namespace = deployment.engine.namespace_override or identity.namespace()
    return Named(namespace, served_path(deployment.engine, namespace), identity.as_dict())


def _running(deployment: Deployment) -> Named:
    doing = "reading which identity runs"
    pid = listener(deployment.engine.port)
    argv = command_line(pid) if pid is not None else None
    if argv is None or ENGINE_MODULE not in argv:
        raise InconclusiveError(
            doing, f"no engine that can be seen listens on port {deployment.engine.port}", "Start kvp-vllm-engine."
        )
    path = parse_options(argv[argv.index(ENGINE_MODULE) + 1 :]).get("--model", [""])[-1]
    try:
        current = _current(deployment)
        if current.model_path == path:
            return current
    except KvpError:
        pass  # a missing or damaged file does not change what runs
    for entry in entries(deployment.state_dir)[0]:
        if entry.model_path == path:
            return _of_entry(entry)
    raise InconclusiveError(doing, f"no identity of this host is served as {path!r}", "Run the playbook.")


def _of_entry(entry: Entry) -> Named:
    return Named(entry.model_path.rpartition("/")[2], entry.model_path, entry.identity)


def _path(state_dir: str, namespace: str) -> str:
    return f"{state_dir}/{HISTORY}/{namespace}.json"


def _read(path: str) -> Entry:
    content = read_json(path)
    try:
        entry = Entry(**content)
        parts = (entry.identity, entry.sources, entry.files)
        texts = (entry.namespace, entry.model_path, entry.deployed, *entry.files.values())
        whole = all(isinstance(part, dict) for part in parts) and all(isinstance(text, str) for text in texts)
    except (TypeError, AttributeError) as error:
        raise UsageError(f"reading {path}", reason(error), "Remove it.") from None
    if not whole or _path("", entry.namespace).rpartition("/")[2] != os.path.basename(path):
        raise UsageError(f"reading {path}", "it holds no identity of this host", "Remove it.")
    return entry
