"""host.model_folder: which bytes of a model folder decide about which fact."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Callable

import pytest
from kvp_kit import CONFIG, TEMPLATE, download_from_hugging_face, make_model
from kvpersist.core.errors import UsageError
from kvpersist.host.hashing import HashCache
from kvpersist.host.model_folder import ModelFacts, read_model, tokenizer_files, weight_shards

# Frozen: what these digests are made of is part of the format. A change here throws every stored cache away.
GOLDEN = ModelFacts(
    model_config_sha256="25455bcda78b9f5f3908ff8edea19bf37c20a2356289d572799fc34f7bc7967b",
    model_dtype="bfloat16",
    kv_geometry="2*full(heads=2,k=16,v=16)",
    rope='{"rope_theta":10000}',
    quantization="none",
    quantization_config=None,
    weights_sha256="c984a4e4a609e6efe5d882d89ad8564156c415c29d52f26fef148a2190d3623f",
    tokenizer_sha256="a9751687b213a35763dd991845b9162141ba1cd15d25421b06ac3dae88b80dd9",
    chat_template_sha256="61fbedab465ef2a7f1b123fc7e4bc06a995bd09ac381579affeda60f02ebd940",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def facts(folder: Path) -> ModelFacts:
    return read_model(str(folder), HashCache(None))


def changed_facts(folder: Path, change: Callable[[], object]) -> set[str]:
    before = asdict(facts(folder))
    change()
    after = asdict(facts(folder))
    return {name for name in before if before[name] != after[name]}


def set_config(folder: Path, **values: object) -> None:
    config = {**json.loads((folder / "config.json").read_text(encoding="utf-8")), **values}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")


def test_facts_of_a_small_model_are_the_golden_ones(model: Path) -> None:
    assert facts(model) == GOLDEN


def test_digests_are_sha256_over_names_and_sha256_of_the_files(model: Path) -> None:
    def fingerprint(names: list[str]) -> str:
        pairs = [[name, hashlib.sha256((model / name).read_bytes()).hexdigest()] for name in names]
        return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()

    found = facts(model)
    assert found.weights_sha256 == fingerprint(["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
    assert found.tokenizer_sha256 == fingerprint(["tokenizer.json", "tokenizer_config.json"])
    assert found.chat_template_sha256 == hashlib.sha256(TEMPLATE.encode()).hexdigest()


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("model-00001-of-00002.safetensors", "weights_sha256"),
        ("model-00002-of-00002.safetensors", "weights_sha256"),
        ("tokenizer.json", "tokenizer_sha256"),
        ("tokenizer_config.json", "tokenizer_sha256"),
        ("chat_template.jinja", "chat_template_sha256"),
    ],
)
def test_one_byte_changes_exactly_its_fact(model: Path, name: str, fact: str) -> None:
    def change() -> None:
        content = bytearray((model / name).read_bytes())
        content[-2] = content[-2] + 1 if content[-2] != ord("}") else ord(" ")
        if name.endswith(".json"):
            content = bytearray((model / name).read_bytes() + b" ")
        (model / name).write_bytes(content)

    assert changed_facts(model, change) == {fact}


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", 0.5), ("hidden_act", "gelu"), ("architectures", ["Other"]), ("num_experts_per_tok", 4)],
)
def test_every_other_field_of_config_json_is_part_of_the_identity(model: Path, name: str, value: object) -> None:
    assert changed_facts(model, lambda: set_config(model, **{name: value})) == {"model_config_sha256"}


def test_the_model_s_own_code_is_part_of_the_identity(model: Path) -> None:
    code = model / "modeling_own.py"
    assert changed_facts(model, lambda: code.write_text("SCALE = 1")) == {"model_config_sha256"}
    assert changed_facts(model, lambda: code.write_text("SCALE = 2")) == {"model_config_sha256"}


def test_where_a_config_json_came_from_changes_nothing(model: Path) -> None:
    assert changed_facts(model, lambda: set_config(model, _name_or_path="/x", transformers_version="9")) == set()


def test_swapping_two_shards_changes_the_weights(model: Path) -> None:
    def change() -> None:
        first, second = sorted(model.glob("*.safetensors"))
        first.rename(model / "kept")
        second.rename(first)
        (model / "kept").rename(second)

    assert changed_facts(model, change) == {"weights_sha256"}


def test_a_tokenizer_file_more_changes_the_tokenizer(model: Path) -> None:
    assert changed_facts(model, lambda: (model / "added_tokens.json").write_text("{}")) == {"tokenizer_sha256"}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: [os.utime(path, (1, 1)) for path in folder.iterdir()],
        lambda folder: (folder / "README.md").write_text("read me"),
        lambda folder: (folder / "generation_config.json").write_text("{}"),
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b"the same weights in an old format"),
        lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG, indent=4, sort_keys=True)),
        lambda folder: [path.chmod(0o600) for path in folder.iterdir()],
    ],
    ids=["times", "readme", "generation-config", "unused-weights", "config-layout", "modes"],
)
def test_what_does_not_decide_about_kv_changes_nothing(model: Path, change: Callable[[Path], object]) -> None:
    assert changed_facts(model, lambda: change(model)) == set()


def test_the_folder_s_own_name_changes_nothing_also_behind_links(model: Path, tmp_path: Path) -> None:
    before = facts(model)
    (tmp_path / "link").symlink_to(model)
    assert facts(tmp_path / "link") == before
    blobs = tmp_path / "blobs"
    model.rename(blobs)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert facts(snapshot) == before


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ({"num_hidden_layers": 3}, "kv_geometry"),
        ({"num_key_value_heads": 4}, "kv_geometry"),
        ({"rope_theta": 20000}, "rope"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope"),
        ({"dtype": "float16"}, "model_dtype"),
    ],
)
def test_each_field_of_config_json_changes_its_fact(model: Path, values: dict[str, object], fact: str) -> None:
    assert changed_facts(model, lambda: set_config(model, **values)) == {fact, "model_config_sha256"}


def test_quantization_is_named_with_a_digest_of_all_its_fields(model: Path) -> None:
    set_config(model, quantization_config={"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    first = facts(model)
    assert first.quantization.startswith("fp8 sha256:")
    assert first.quantization_config is not None
    set_config(model, quantization_config={"quant_method": "fp8"})
    assert facts(model).quantization not in ("none", first.quantization)


def test_dtype_of_older_configurations_is_read_too(model: Path) -> None:
    set_config(model, dtype=None, torch_dtype="torch.float16")
    assert facts(model).model_dtype == "float16"


def safetensors(path: Path, *dtypes: str) -> None:
    header = json.dumps({f"t{number}": {"dtype": dtype} for number, dtype in enumerate(dtypes)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(("stored", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "bfloat16")])
def test_the_weights_headers_tell_the_dtype_where_config_json_does_not(model: Path, stored: str, dtype: str) -> None:
    set_config(model, dtype=None)
    for path in model.glob("*.safetensors"):
        safetensors(path, stored)
    assert facts(model).model_dtype == dtype


def test_modelopt_s_own_file_is_the_quantization(model: Path) -> None:
    plain = facts(model)
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (model / "hf_quant_config.json").write_text(json.dumps(content), encoding="utf-8")
    assert facts(model).quantization_config == content
    assert facts(model).quantization != plain.quantization


# Where the chat template comes from


def template_digest(folder: Path) -> str:
    return facts(folder).chat_template_sha256


def test_chat_template_of_tokenizer_config_counts_when_there_is_no_file(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    assert template_digest(model) == hashlib.sha256(TEMPLATE.encode()).hexdigest()


def test_chat_template_file_wins_over_tokenizer_config(model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "another"}), encoding="utf-8")
    assert template_digest(model) == hashlib.sha256(TEMPLATE.encode()).hexdigest()


def test_named_chat_templates_count_in_any_order_of_keys(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "x"}]}', encoding="utf-8"
    )
    first = template_digest(model)
    (model / "tokenizer_config.json").write_text(
        '{"chat_template": [{"template": "x", "name": "default"}]}', encoding="utf-8"
    )
    assert template_digest(model) == first
    (model / "tokenizer_config.json").write_text(
        '{"chat_template": [{"template": "y", "name": "default"}]}', encoding="utf-8"
    )
    assert template_digest(model) != first


def test_a_model_without_a_chat_template_has_the_digest_of_nothing(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert template_digest(model) == hashlib.sha256(b"").hexdigest()


# A model that was downloaded from Hugging Face


def test_the_commit_of_the_download_is_a_fact_and_a_download_that_says_nothing_is_none(model: Path) -> None:
    assert facts(model).commit is None
    assert facts(model).model_revision == GOLDEN.weights_sha256[:40]
    download_from_hugging_face(model, "a" * 40)
    assert facts(model) == replace(GOLDEN, commit="a" * 40)
    assert facts(model).model_revision == "a" * 40


def test_every_file_that_is_not_what_its_download_expected_is_named_with_both_digests(model: Path) -> None:
    download_from_hugging_face(model, "a" * 40)
    cache = HashCache(None)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    expected, found = [], []
    for name in names:
        content = (model / name).read_bytes()
        expected.append(hashlib.sha256(content).hexdigest())
        found.append(hashlib.sha256(content[:-1] + b"?").hexdigest())
        (model / name).write_bytes(content[:-1] + b"?")
    with pytest.raises(UsageError) as caught:
        read_model(str(model), cache)
    assert str(caught.value) == (
        f"checking the model folder {model}: "
        f"{names[0]} has SHA-256 {found[0]}, its download expected {expected[0]}; "
        f"{names[1]} has SHA-256 {found[1]}, its download expected {expected[1]}. "
        "Remove what is named and download it again; a model that was changed on purpose belongs into a folder "
        "without Hugging Face's metadata."
    )
    shutil.rmtree(model / ".cache")
    assert facts(model).commit is None


# What is wrong with a folder


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: folder.rename(folder.parent / "away"), "it is not a folder. Set kvp_model_dir"),
        (remove("config.json"), "config.json: no such file or directory"),
        (write("config.json", '{"dtype": '), "config.json: it is not JSON"),
        (write("config.json", "[1]"), "config.json: it holds no JSON object"),
        (write("config.json", "{}"), "field num_hidden_layers: it is None, not a positive whole number"),
        (lambda folder: set_config(folder, dtype=None), "safetensors: its header cannot be read"),
        (lambda folder: set_config(folder, num_hidden_layers="2"), "field num_hidden_layers: it is '2'"),
        (remove("tokenizer.json"), "reading the tokenizer in"),
        (write("tokenizer_config.json", "{"), "tokenizer_config.json: it is not JSON"),
        (remove("model-00002-of-00002.safetensors"), "shard model-00002-of-00002.safetensors is not in the folder"),
        (write("model.safetensors.index.json", "{"), "model.safetensors.index.json: it is not JSON"),
        (write("model.safetensors.index.json", "{}"), "model.safetensors.index.json: it has no weight_map"),
        (without_weights, "no file ends in .safetensors"),
    ],
    ids=[
        "no-folder",
        "no-config",
        "config-cut",
        "config-list",
        "config-empty",
        "no-dtype",
        "layers-text",
        "no-tokenizer",
        "tokenizer-config-cut",
        "shard-missing",
        "index-cut",
        "index-empty",
        "no-weights",
    ],
)
def test_a_damaged_folder_is_one_clear_line(model: Path, damage: Callable[[Path], object], message: str) -> None:
    if "tokenizer_config" in message:
        (model / "chat_template.jinja").unlink()
    damage(model)
    with pytest.raises(UsageError) as caught:
        facts(model)
    text = str(caught.value)
    assert message in text
    assert str(model) in text
    assert "\n" not in text


def test_a_missing_shard_of_the_older_weight_format_is_found(model: Path) -> None:
    without_weights(model)
    (model / "pytorch_model-00001-of-00002.bin").write_bytes(b"weights")
    index = {"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UsageError, match=r"shard pytorch_model-00002-of-00002\.bin is not in the folder"):
        weight_shards(str(model))


def test_weights_are_of_one_kind_in_the_order_in_which_vllm_prefers_them(model: Path) -> None:
    (model / "model.gguf").write_bytes(b"x")
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert {Path(name).suffix for name in weight_shards(str(model))} == {".safetensors"}
    without_weights(model)
    (model / "model.gguf").write_bytes(b"x")
    assert weight_shards(str(model)) == ["pytorch_model.bin"]


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"])
def test_every_known_vocabulary_makes_a_tokenizer(model: Path, name: str) -> None:
    (model / "tokenizer.json").rename(model / name)
    assert sorted(tokenizer_files(str(model))) == sorted([name, "tokenizer_config.json"])
