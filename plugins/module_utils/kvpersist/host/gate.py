"""Collects what the identity gate compares: from the processes that run, the folder they serve and the server's API."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import commands
from ..core.deployment import Deployment
from ..core.engine_args import OPTION_FIELDS, layout_flags, option_fields, parse_options, positive_option
from ..core.errors import KvpError
from ..core.gate import Unreadable, Verdict, compare
from ..core.identity import Identity, kv_cache_scales, resolve_kv_cache_dtype
from ..core.l2_backends import backend_of, codec_of
from .environments import engine_build, lmcache_version
from .hashing import HashCache
from .http import get_json
from .identity import HASH_CACHE, namespace_of
from .model_folder import ModelFacts, read_model
from .processes import command_line, listener, visible_path

_AS_ROOT = "Run this as the user of the service, or as root"


def run_gate(deployment: Deployment, identity: Identity) -> Verdict:
    """Compares the identity with what runs now. Reads only; the hash cache is used but not written."""
    engine_argv = _argv_of_listener(deployment.engine.port, commands.ENGINE_MODULE, "kvp-vllm-engine")
    cache_argv = _argv_of_listener(deployment.cache.port, commands.CACHE_MODULE, "kvp-lmcache-server")
    observed: dict[str, Any] = {
        **_declared(deployment),
        **_from_engine(engine_argv, deployment),
        **_from_cache(cache_argv),
    }
    links = {
        **_links_of_engine(engine_argv, deployment, identity),
        **_links_of_server(deployment, identity),
    }
    return compare(identity, observed, links)


class _Running:
    """A running program: its pid and its arguments by option."""

    def __init__(self, pid: int, argv: Sequence[str], module: str) -> None:
        self.pid = pid
        self.argv = argv
        self.options = parse_options(argv[argv.index(module) + 1 :])

    def value(self, name: str, default: str | None = None) -> Any:
        """The one value of an option, or Unreadable where it is absent or stands twice with different values."""
        values = set(self.options.get(name, () if default is None else (default,)))
        if not values:
            return Unreadable(f"the running program has no {name}", "Start it with the project's launcher")
        if len(values) > 1:
            return Unreadable(f"{name} stands there as {' and as '.join(sorted(values))}", "Give it once")
        return values.pop()

    def number(self, name: str) -> Any:
        """The value of an option as a whole number."""
        value = self.value(name)
        if isinstance(value, Unreadable) or not (value.isascii() and value.isdigit()):
            return value if isinstance(value, Unreadable) else Unreadable(f"{name} is {value!r}", "Give it as a number")
        return int(value)


def _argv_of_listener(port: int, module: str, service: str) -> _Running | Unreadable:
    pid = listener(port)
    argv = command_line(pid) if pid is not None else None
    if pid is None or argv is None:
        return Unreadable(f"no process that can be seen listens on port {port}", f"Start {service}. {_AS_ROOT}")
    if module not in argv:
        return Unreadable(f"process {pid} on port {port} is not {module}", f"Stop it and start {service}")
    return _Running(pid, argv, module)


def _declared(deployment: Deployment) -> dict[str, Any]:
    """Facts that no running program shows; they come from tp4.env and are bound to the engine by the namespace."""
    engine = deployment.engine
    return {"model_id": engine.model_id, "tokenizer_name": engine.model_id, "device": engine.device}


def _from_engine(engine: _Running | Unreadable, deployment: Deployment) -> dict[str, Any]:
    served = _served_model(engine, deployment)
    facts = {
        "model_revision": _of(served, lambda model: deployment.engine.model_revision or model.model_revision),
        "model_config_sha256": _of(served, lambda model: model.model_config_sha256),
        "model_dtype": _of(served, lambda model: model.model_dtype),
        "kv_cache_scales": _of(served, lambda model: kv_cache_scales(model.quantization_config)),
        "kv_geometry": _of(served, lambda model: model.kv_geometry),
        "rope": _of(served, lambda model: model.rope),
        "quantization": _of(served, lambda model: model.quantization),
        "weights_sha256": _of(served, lambda model: model.weights_sha256),
        "tokenizer_sha256": _of(served, lambda model: model.tokenizer_sha256),
        "chat_template_sha256": _of(served, lambda model: model.chat_template_sha256),
        "kv_cache_dtype": _kv_cache_dtype(engine, served),
        "block_size": _of(engine, lambda run: run.number("--block-size")),
        "max_model_len": _of(engine, lambda run: run.number("--max-model-len")),
        "tensor_parallel_size": _of(engine, lambda run: positive_option(run.options, "--tensor-parallel-size")),
        "pipeline_parallel_size": _of(engine, lambda run: positive_option(run.options, "--pipeline-parallel-size")),
        "decode_context_parallel_size": _of(
            engine, lambda run: positive_option(run.options, "--decode-context-parallel-size")
        ),
        "enforce_eager": _of(engine, lambda run: "--enforce-eager" in run.options),
        "engine_flags": _of(engine, lambda run: layout_flags(run.options)),
        "connector": _of(_connector(engine), lambda config: config.get("kv_connector_module_path")),
        "engine_build": _of(engine, lambda run: _engine_build(run, deployment)),
        "lmcache_version": _of(engine, lambda run: _lmcache_version(run, deployment)),
    }
    flags = _of(engine, lambda run: option_fields(run.options))
    facts.update({name: _of(flags, operator.itemgetter(name)) for name in OPTION_FIELDS})
    facts["tokenizer_revision"] = facts["model_revision"]
    return facts


def _from_cache(cache: _Running | Unreadable) -> dict[str, Any]:
    adapter = _of(cache, lambda run: _json_option(run, "--l2-adapter"))
    return {
        "chunk_size": _of(cache, lambda run: run.number("--chunk-size")),
        "hash_algorithm": _of(cache, lambda run: run.value("--hash-algorithm")),
        "object_groups": _of(cache, lambda run: "--separate-object-groups" in run.options),
        "codec": _of(adapter, codec_of),
        "l2_format": _of(adapter, _file_format),
    }


def _links_of_engine(engine: _Running | Unreadable, deployment: Deployment, identity: Identity) -> dict[str, Any]:
    wanted = commands.connector_config(deployment.engine)["kv_connector_extra_config"]
    expected = commands.served_path(deployment.engine, namespace_of(deployment, identity))
    return {
        # Without the connector the engine serves the plain folder, which says nothing about the cache.
        "model_path": (expected, _of(_connector(engine), lambda _: _of(engine, lambda run: run.value("--model")))),
        "cache_address": (wanted, _of(_connector(engine), lambda config: config.get("kv_connector_extra_config"))),
    }


def _links_of_server(deployment: Deployment, identity: Identity) -> dict[str, Any]:
    url = deployment.cache.http_url
    links: dict[str, Any] = {}
    if deployment.cache.launch_mode == "host":
        links["lmcache_server_version"] = (identity.lmcache_version, _ask(f"{url}/lmc_version", _server_version))
    path = commands.served_path(deployment.engine, namespace_of(deployment, identity))
    links["registered_model"] = (path, _ask(f"{url}/status", lambda status: _registered(status, path)))
    return links


def _served_model(engine: _Running | Unreadable, deployment: Deployment) -> ModelFacts | Unreadable:
    if isinstance(engine, Unreadable):
        return engine
    model = engine.value("--model")
    if isinstance(model, Unreadable):
        return model
    folder = visible_path(engine.pid, model)
    if folder is None:
        return Unreadable(f"the files of process {engine.pid} cannot be looked at", _AS_ROOT)
    try:
        return read_model(folder, HashCache(f"{deployment.state_dir}/{HASH_CACHE}"))
    except KvpError as error:
        return Unreadable(f"{error.doing}: {error.cause}", error.fix.rstrip("."))


def _kv_cache_dtype(engine: _Running | Unreadable, served: ModelFacts | Unreadable) -> Any:
    value = _of(engine, lambda run: run.value("--kv-cache-dtype", default="auto"))
    if isinstance(value, Unreadable) or isinstance(served, Unreadable):
        # A spelled-out dtype needs no model; only `auto` does.
        return value if value != "auto" else served
    return _of(served, lambda model: resolve_kv_cache_dtype(value, model.model_dtype, model.quantization_config))


def _connector(engine: _Running | Unreadable) -> Any:
    if not isinstance(engine, Unreadable) and "--kv-transfer-config" not in engine.options:
        return Unreadable("the engine runs without --kv-transfer-config", "Start it with KV_PERSIST=1")
    return _of(engine, lambda run: _json_option(run, "--kv-transfer-config"))


def _json_option(run: _Running, name: str) -> Any:
    value = run.value(name)
    if isinstance(value, Unreadable):
        return value
    try:
        content = json.loads(value)
    except ValueError:
        content = None
    return (
        content if isinstance(content, dict) else Unreadable(f"{name} is no JSON object", "Use the project's launcher")
    )


def _file_format(config: Mapping[str, Any]) -> Any:
    backend = backend_of(config)
    return (
        backend.file_format if backend else Unreadable(f"adapter {config.get('type')!r} is unknown", "Use a known one")
    )


def _engine_build(run: _Running, deployment: Deployment) -> str:
    return deployment.engine.image if deployment.engine.launch_mode == "docker" else engine_build(_venv_of(run))


def _lmcache_version(run: _Running, deployment: Deployment) -> str:
    return deployment.cache.image if deployment.engine.launch_mode == "docker" else lmcache_version(_venv_of(run))


def _venv_of(run: _Running) -> str:
    # argv[0] is <venv>/bin/python; /proc/<pid>/exe would be the base interpreter behind it.
    return run.argv[0].rsplit("/bin/", 1)[0]


def _server_version(answer: Any) -> Any:
    text = answer.get("lmc_version", answer.get("version")) if isinstance(answer, dict) else answer
    return str(text).split("-", 1)[0].lstrip("v")


def registered_models(status: Any) -> list[str]:
    """Model paths that engines have registered with the cache server, from its ``/status``."""
    return sorted(set(_model_names(status)))


def _registered(status: Any, path: str) -> Any:
    found = registered_models(status)
    if path in found:
        return path
    return Unreadable(
        f"the cache server has no registration of this model (registered: {', '.join(found) or 'none'})",
        "Run the playbook, which restarts the engine; it registers when it starts",
    )


def _model_names(value: Any) -> list[str]:
    """Every ``model_name`` in the server's status, which keeps one per registered worker in several sections."""
    if isinstance(value, dict):
        own = [value["model_name"]] if isinstance(value.get("model_name"), str) else []
        return own + [name for part in value.values() for name in _model_names(part)]
    if isinstance(value, list):
        return [name for part in value for name in _model_names(part)]
    return []


def _ask(url: str, read: Any) -> Any:
    try:
        return read(get_json(url))
    except KvpError as error:
        return Unreadable(f"{error.doing}: {error.cause}", error.fix.rstrip("."))


def _of(source: Any, read: Any) -> Any:
    """``read(source)``, or the reason why the source, or this fact of it, could not be read."""
    if isinstance(source, Unreadable):
        return source
    try:
        return read(source)
    except KvpError as error:
        return Unreadable(f"{error.doing}: {error.cause}", error.fix.rstrip("."))
