"""Derives the identity of a deployment from its settings, its model folder and its installed versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core import commands
from ..core.deployment import CacheServer, Deployment, Engine
from ..core.engine_args import check_extra_args, option_fields, parse_options, positive_option
from ..core.errors import InconclusiveError, KvpError, MismatchError, UsageError
from ..core.explain import Explanation, Named, explain
from ..core.identity import (
    IDENTITY_ENV,
    Identity,
    differences,
    field_sources,
    kv_cache_scales,
    model_path,
    resolve_kv_cache_dtype,
)
from ..core.l2_backends import BACKENDS
from ..core.settings import Value
from .deployment import deployment_of, load_identity
from .environments import engine_build, lmcache_version
from .hashing import HashCache, Progress
from .history import find, named, remember, settings_of, stored_under
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
        kv_cache_scales=kv_cache_scales(facts.quantization_config),
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
        **option_fields(options),
        object_groups=commands.SEPARATE_OBJECT_GROUPS,
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
    """An identity and what saving it changes.

    Attributes:
        sources: how each field is known.
        explanation: what differs from the identity before, and what becomes of its KV; None without one.
        warnings: what went wrong beside the deployment.
    """

    namespace: str
    model_path: str
    identity: Identity
    sources: Mapping[str, str]
    previous: Identity | None
    explanation: Explanation | None
    changes: tuple[Change, ...]
    warnings: tuple[str, ...] = ()

    def as_result(self) -> dict[str, Any]:
        """The keys that the module returns."""
        changed = differences(self.previous, self.identity) if self.previous else []
        return {
            "changed": any(change.changed for change in self.changes),
            "diff": [change.diff() for change in self.changes if change.changed],
            "namespace": self.namespace,
            "model_path": self.model_path,
            "identity": self.identity.as_dict(),
            "sources": dict(self.sources),
            "differences": [{"name": name, "old": old, "new": new} for name, old, new in changed],
            "explanation": self.explanation.as_dict() if self.explanation and changed else None,
        }


def save_identity(deployment: Deployment, trust_hash_cache: bool, check_mode: bool) -> SavedIdentity:
    """Derives the identity and saves it as identity.env.local, with the link under which the model is served.

    It is also kept in the host's history, with the environment files as they are now.

    Raises:
        UsageError, PreflightError: as :func:`resolve_identity`; nothing but digests is written then.
    """
    cache = HashCache(f"{deployment.state_dir}/{HASH_CACHE}", trust=trust_hash_cache, keep=not check_mode)
    identity = resolve_identity(deployment, cache)
    sources = field_sources(deployment.engine)
    namespace = namespace_of(deployment, identity)
    path = commands.served_path(deployment.engine, namespace)
    try:
        previous = load_identity(deployment.config_dir)
    except (InconclusiveError, UsageError):
        previous = None  # none yet, or a damaged one that is about to be replaced
    explanation = None
    if previous is not None and previous != identity:
        explanation = explained(deployment, named(deployment, "current"), Named(namespace, path, identity.as_dict()))
    changes = []
    warnings = []
    if deployment.engine.launch_mode == "host":
        changes.append(manage_link(path, deployment.engine.model_dir, check_mode))
    changes.append(manage_file(f"{deployment.config_dir}/{IDENTITY_ENV}", identity.render(sources), check_mode))
    if not check_mode:
        try:
            remember(deployment, identity, path, sources)
        except KvpError as error:
            warnings.append(f"{error} Without it a rollback to this identity is not possible.")
    return SavedIdentity(namespace, path, identity, sources, previous, explanation, tuple(changes), tuple(warnings))


def explained(deployment: Deployment, old: Named, new: Named) -> Explanation:
    """What differs between two identities, and what the cache root holds under the first."""
    return explain(old, new, stored_under(deployment.cache.root, old.model_path))


@dataclass(frozen=True)
class Rollback:
    """An earlier deployment of this host, checked to be possible again.

    Attributes:
        values: its settings by Ansible variable.
        present: the settings that were given, in the same way.
    """

    namespace: str
    model_path: str
    values: Mapping[str, Value]
    present: Mapping[str, Value]

    def as_result(self) -> dict[str, Any]:
        """The keys that the module returns."""
        pairs = ((name, self.present[name], value) for name, value in self.values.items())
        return {
            "changed": False,
            "namespace": self.namespace,
            "model_path": self.model_path,
            "values": dict(self.values),
            "differences": [{"name": name, "now": now, "then": then} for name, now, then in pairs if now != then],
        }


def plan_rollback(present: Mapping[str, Value], namespace: str) -> Rollback:
    """Looks whether an earlier identity of this host can be brought back. Reads only.

    Args:
        present: typed settings of the deployment as it is asked for now, by Ansible variable.

    Raises:
        UsageError: when the host never had it, or its model is no longer there.
        MismatchError: when its settings no longer lead to it, naming the fields: other weights in the same place,
            another version in the same environment.
    """
    deployment = deployment_of(present)
    entry = find(deployment.state_dir, namespace)
    values = settings_of(entry, deployment.config_dir)
    earlier = deployment_of(values)
    identity = resolve_identity(earlier, HashCache(f"{deployment.state_dir}/{HASH_CACHE}"))
    path = commands.served_path(earlier.engine, namespace_of(earlier, identity))
    if identity.namespace() != namespace:
        was, now = Named(namespace, entry.model_path, entry.identity), Named(namespace, path, identity.as_dict())
        facts = "; ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in explain(was, now, None).changes)
        raise MismatchError(
            f"bringing back {namespace}",
            facts,
            "Put back what was there, or choose another (kvpersist identity history).",
        )
    return Rollback(namespace, path, values, present)
