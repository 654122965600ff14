"""What an L2 backend needs on the host, and what it holds there."""

from __future__ import annotations

import dataclasses
import os

from ..core import commands
from ..core.deployment import CacheServer, Deployment
from ..core.engine_args import parse_options, positive_option
from ..core.errors import InconclusiveError, UsageError
from ..core.geometry import geometry_from_config, language_model
from ..core.l2_backends import BACKENDS, backing_file
from .cache_scan import path_size
from .files import read_json, tree_bytes
from .http import get_json
from .managed import Change, manage_allocated_file
from .model_folder import kv_cache_dtype


def cache_server(deployment: Deployment) -> CacheServer:
    """The cache server, with the size of an object where its L2 backend needs that.

    Raises:
        UsageError: when the model's config.json does not tell it.
    """
    cache, engine = deployment.cache, deployment.engine
    if not BACKENDS[cache.l2_backend].has_slots:
        return cache
    path = f"{engine.model_dir}/config.json"
    config = read_json(path)
    if "index_head_dim" in language_model(config):
        raise UsageError(
            f"reading the size of a KV object from {path}",
            "the indexer of its sparse attention keeps a state of its own",
            f"Take another cache_server_l2_backend than {cache.l2_backend}.",
        )
    geometry = geometry_from_config(config, path)
    per_token = geometry.most_token_bytes(
        kv_cache_dtype(config, geometry, engine.model_dir, engine.kv_cache_dtype),
        engine.tensor_parallel_size,
        positive_option(parse_options(engine.extra_args), "--pipeline-parallel-size"),
    )
    return dataclasses.replace(cache, object_bytes=per_token * cache.chunk_size)


def manage_backing_file(deployment: Deployment, check_mode: bool) -> Change | None:
    """Makes the file that a backend with slots expects; None for any other.

    Raises:
        UsageError: when it cannot be made.
    """
    if not BACKENDS[deployment.cache.l2_backend].has_slots:
        return None
    return manage_allocated_file(*backing_file(commands.tier_of(deployment.cache)), check_mode)


def held_bytes(cache: CacheServer) -> tuple[int, int]:
    """Bytes below the root that are the L2 backend's own, and those of others; both 0 where there is no root."""
    own = others = 0
    for name in os.listdir(cache.root) if os.access(cache.root, os.R_OK | os.X_OK) else ():
        size = path_size(f"{cache.root}/{name}")
        if BACKENDS[cache.l2_backend].own_files.match(name):
            own += size
        else:
            others += size
    return own, others


def stored_bytes(cache: CacheServer) -> tuple[int, int]:
    """Bytes of stored objects, and how many changes a killed server would lose.

    Files speak for themselves. A file of slots always has the same size, so there the running server is asked.

    Raises:
        KvpError: when the server does not say.
    """
    if not BACKENDS[cache.l2_backend].has_slots:
        return tree_bytes(cache.root), 0
    url = f"{cache.http_url}/status"
    try:
        slots = get_json(url)["storage_manager"]["l2_adapters"][0]["core"]
        used = slots["indexed_key_count"] * slots["slot_bytes"]
        return used, slots["metadata_dirty_total"] - slots["metadata_persisted"]
    except (KeyError, IndexError, TypeError):
        raise InconclusiveError(
            f"reading {url}",
            f"it does not tell what {cache.l2_backend} holds",
            "Use the LMCache that this is made for.",
        ) from None
