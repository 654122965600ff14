"""Derives the identity of a deployment from its settings, its model folder and its installed versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core import commands
from ..core.deployment import CacheServer, Deployment, Engine
from ..core.engine_args import check_extra_args, layout_flags, parse_options, positive_option
from ..core.errors import InconclusiveError, MismatchError, UsageError
from ..core.identity import IDENTITY_ENV, Identity, differences, model_path, resolve_kv_cache_dtype
from ..core.l2_backends import BACKENDS
from .deployment import load_identity
from .environments import engine_build, lmcache_version
from .hashing import HashCache, Progress
from .managed import Change, manage_file, manage_link
from .model_folder import read_model

HASH_CACHE = "hash-cache.jsonl"


def resolve_identity(deployment: Deployment, cache: HashCache, progress: Progress | None = None) -> Identity:
    """The identity that this deployment's settings lead to.

    Args:
        cache: remembered digests, and where new ones go.
        progress: told of the bytes that must be hashed.

    Raises:
        UsageError, PreflightError: when a fact cannot be had; nothing is guessed.
    """
    engine, server = deployment.engine, deployment.cache
    check_extra_args(engine.extra_args)
    facts = read_model(engine.model_dir, cache, progress)
    options = parse_options(engine.extra_args)
    revision = engine.model_revision or facts.model_revision
    return Identity(
        model_id=engine.model_id,
        model_revision=revision,
        weights_sha256=facts.weights_sha256,
        tokenizer_name=engine.model_id,
        tokenizer_revision=revision,
        tokenizer_sha256=facts.tokenizer_sha256,
        chat_template_sha256=facts.chat_template_sha256,
        model_config_sha256=facts.model_config_sha256,
        model_dtype=facts.model_dtype,
        kv_cache_dtype=resolve_kv_cache_dtype(engine.kv_cache_dtype, facts.model_dtype, facts.quantization_config),
        kv_geometry=facts.kv_geometry,
        rope=facts.rope,
        quantization=facts.quantization,
        block_size=engine.block_size,
        chunk_size=server.chunk_size,
        max_model_len=engine.max_model_len,
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=positive_option(options, "--pipeline-parallel-size"),
        decode_context_parallel_size=positive_option(options, "--decode-context-parallel-size"),
        enforce_eager=engine.enforce_eager,
        engine_flags=layout_flags(options),
        object_groups=False,
        hash_algorithm=commands.HASH_ALGORITHM,
        device=engine.device,
        engine_build=_engine_build(engine),
        lmcache_version=_lmcache_version(engine, server),
        connector=commands.CONNECTOR_MODULE,
        codec=server.codec,
        l2_format=BACKENDS[server.l2_backend].file_format,
    )


def verified_identity(deployment: Deployment, progress: Progress | None = None) -> Identity:
    """The identity of identity.env.local, after deriving it again and finding no difference.

    Raises:
        MismatchError: naming each field that differs, with both values.
        UsageError, PreflightError: when it cannot be read or derived.
    """
    stored = load_identity(deployment.config_dir)
    cache = HashCache(f"{deployment.state_dir}/{HASH_CACHE}", keep=True)
    current = resolve_identity(deployment, cache, progress)
    changed = differences(stored, current)
    if changed:
        facts = "; ".join(f"{name} is {old!r} there and {new!r} here" for name, old, new in changed)
        raise MismatchError(
            f"comparing {IDENTITY_ENV} with the settings and the model", facts, "Run the playbook to write it again."
        )
    return stored


def namespace_of(deployment: Deployment, identity: Identity) -> str:
    """The namespace under which the model is served: derived, or the operator's override.

    Raises:
        UsageError: when the resulting model path does not fit LMCache's file names.
    """
    namespace = deployment.engine.namespace_override or identity.namespace()
    check_model_path(deployment, namespace)
    return namespace


def check_model_path(deployment: Deployment, namespace: str) -> None:
    """Checks that the path under which a namespace is served fits LMCache's file names.

    Raises:
        UsageError: when it does not.
    """
    engine = deployment.engine
    backend = BACKENDS[deployment.cache.l2_backend]
    model_path(engine.models_dir, engine.model_family, namespace, backend.longest_model_path, backend.spell)


def _engine_build(engine: Engine) -> str:
    return engine.image if engine.launch_mode == "docker" else engine_build(engine.venv)


def _lmcache_version(engine: Engine, server: CacheServer) -> str:
    return server.image if engine.launch_mode == "docker" else lmcache_version(engine.venv)


@dataclass(frozen=True)
class SavedIdentity:
    """An identity and what saving it changes."""

    namespace: str
    model_path: str
    identity: Identity
    previous: Identity | None
    changes: tuple[Change, ...]

    def as_result(self) -> dict[str, Any]:
        """The keys that the module returns."""
        changed = differences(self.previous, self.identity) if self.previous else []
        return {
            "changed": any(change.changed for change in self.changes),
            "diff": [change.diff() for change in self.changes if change.changed],
            "namespace": self.namespace,
            "model_path": self.model_path,
            "identity": self.identity.as_dict(),
            "differences": [{"name": name, "old": old, "new": new} for name, old, new in changed],
        }


def save_identity(deployment: Deployment, trust_hash_cache: bool, check_mode: bool) -> SavedIdentity:
    """Derives the identity and saves it as identity.env.local, with the link under which the model is served.

    Raises:
        UsageError, PreflightError: as :func:`resolve_identity`; nothing but digests is written then.
    """
    cache = HashCache(f"{deployment.state_dir}/{HASH_CACHE}", trust=trust_hash_cache, keep=not check_mode)
    identity = resolve_identity(deployment, cache)
    namespace = namespace_of(deployment, identity)
    path = commands.served_path(deployment.engine, namespace)
    try:
        previous = load_identity(deployment.config_dir)
    except (InconclusiveError, UsageError):
        previous = None  # none yet, or a damaged one that is about to be replaced
    changes = []
    if deployment.engine.launch_mode == "host":
        changes.append(manage_link(path, deployment.engine.model_dir, check_mode))
    changes.append(manage_file(f"{deployment.config_dir}/{IDENTITY_ENV}", identity.render(), check_mode))
    return SavedIdentity(namespace, path, identity, previous, tuple(changes))
