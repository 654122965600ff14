"""Launchers: check, confirm, then become the program."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..core import commands
from ..core.deployment import Deployment
from ..core.errors import PreflightError
from .deployment import load_identity
from .files import link_target, reason
from .health import cache_answers
from .identity import namespace_of, verified_identity
from .l2_tier import cache_server, manage_backing_file
from .progress import ProgressLines


def launch_cache(deployment: Deployment, environment: Mapping[str, str]) -> NoReturn:
    """Becomes the cache server.

    Raises:
        PreflightError: when its folder cannot be made or its program is missing.
        UsageError: when its L2 backend cannot be laid out.
    """
    cache = cache_server(deployment)
    root = cache.root
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
    except OSError as error:
        raise PreflightError(
            f"making {root}", reason(error), "Set kvp_cache_root to a folder that can be made."
        ) from None
    manage_backing_file(deployment, check_mode=False)
    _become(commands.cache_argv(cache), environment, commands.cache_environment(cache))


def launch_engine(deployment: Deployment, environment: Mapping[str, str]) -> NoReturn:
    """Becomes the engine; with the cache attached only when the cache works and the identity holds.

    Raises:
        PreflightError: when the cache server does not answer, the model is not linked or a program is missing.
        MismatchError: when identity.env.local is not the identity of these settings and this model.
    """
    engine = deployment.engine
    namespace = _attached_namespace(deployment) if engine.kv_persist else None
    if namespace is not None:
        for line in commands.confirmation(engine, namespace):
            print(line, flush=True)
    _become(commands.engine_argv(engine, namespace), environment, commands.engine_environment(engine))


def _attached_namespace(deployment: Deployment) -> str:
    engine = deployment.engine
    if not cache_answers(deployment):
        raise PreflightError(
            "starting the engine with KV_PERSIST=1",
            f"no healthy cache server at {engine.cache_host}:{engine.cache_port} and {deployment.cache.http_url}",
            "Start it first: kvpersist launch cache (service kvp-lmcache-server), or set KV_PERSIST=0.",
        )
    if engine.namespace_override:
        print(
            f"WARNING: KV_PERSIST_NAMESPACE={engine.namespace_override} overrides the derived namespace; "
            "keeping incompatible KV apart is now your duty.",
            file=sys.stderr,
            flush=True,
        )
        identity = load_identity(deployment.config_dir)
    else:
        identity = verified_identity(deployment, ProgressLines(lambda line: print(line, flush=True)))
    namespace = namespace_of(deployment, identity)
    path = commands.served_path(engine, namespace)
    if engine.launch_mode == "host" and link_target(path) != engine.model_dir:
        raise PreflightError(
            "starting the engine with KV_PERSIST=1",
            f"{path} is not a link to {engine.model_dir}",
            "Run the playbook with --tags identity.",
        )
    return namespace


def _become(argv: Sequence[str], environment: Mapping[str, str], own: Mapping[str, str]) -> NoReturn:
    program = shutil.which(argv[0])
    if program is None:
        raise PreflightError(f"starting {argv[0]}", "this program is missing", "Install it, or correct the settings.")
    try:
        os.execve(program, list(argv), {**own, **environment})  # noqa: S606  # what is exported wins over our defaults
    except OSError as error:
        raise PreflightError(f"starting {program}", reason(error), "Install it again for this machine.") from None
