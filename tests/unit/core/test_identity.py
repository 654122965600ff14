"""Identity and namespace: golden vectors, sensitivity to every field, the file, and the path made of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kvpersist
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core import layout
from kvpersist.core.envfile import parse
from kvpersist.core.errors import EXIT_USAGE, UsageError
from kvpersist.core.identity import (
    FIELDS,
    KV_CACHE_DTYPES,
    NAMESPACE_PATTERN,
    SOURCES,
    Identity,
    differences,
    field_sources,
    identity_from_env,
    kv_cache_scales,
    model_path,
    resolve_kv_cache_dtype,
    sources_from_env,
)
from kvpersist.core.l2_backends import BACKENDS

Make = Callable[..., Identity]

# Written out, not computed: whoever changes one of these throws away the KV of every deployment there is.
GOLDEN_JSON = (
    '{"attention_backend":"none",'
    '"block_size":16,'
    '"chat_template_sha256":"4444444444444444444444444444444444444444444444444444444444444444",'
    '"chunk_size":256,'
    '"codec":"none",'
    '"connector":"lmcache.integration.vllm.lmcache_mp_connector",'
    '"decode_context_parallel_size":1,'
    '"device":"cuda",'
    '"enforce_eager":false,'
    '"engine_build":"vllm 0.32.0",'
    '"engine_flags":"none",'
    '"hash_algorithm":"blake3",'
    '"hf_overrides":"none",'
    '"kv_cache_dtype":"bfloat16",'
    '"kv_cache_scales":"none",'
    '"kv_geometry":"32*full(heads=8,k=128,v=128)",'
    '"l2_format":"raw",'
    '"lmcache_version":"0.5.6",'
    '"max_model_len":131072,'
    '"model_config_sha256":"5555555555555555555555555555555555555555555555555555555555555555",'
    '"model_dtype":"bfloat16",'
    r'"model_id":"org/Mod\u00e8le 7B",'
    '"model_revision":"0123456789abcdef0123456789abcdef01234567",'
    '"object_groups":false,'
    '"pipeline_parallel_size":1,'
    '"quantization":"none",'
    r'"rope":"{\"rope_theta\":500000.0}",'
    '"schema":1,'
    '"speculative_config":"none",'
    '"tensor_parallel_size":4,'
    '"tokenizer_name":"org/tokenizer",'
    '"tokenizer_revision":"2222222222222222222222222222222222222222",'
    '"tokenizer_sha256":"3333333333333333333333333333333333333333333333333333333333333333",'
    '"weights_sha256":"1111111111111111111111111111111111111111111111111111111111111111"}'
)
GOLDEN_NAMESPACE = "kvp-ea111ab95c3da0ddf262538869f31170"
GOLDEN_JSON_TP1 = (
    '{"attention_backend":"none",'
    '"block_size":32,'
    '"chat_template_sha256":"4444444444444444444444444444444444444444444444444444444444444444",'
    '"chunk_size":256,'
    '"codec":"none",'
    '"connector":"lmcache.integration.vllm.lmcache_mp_connector",'
    '"decode_context_parallel_size":1,'
    '"device":"cpu",'
    '"enforce_eager":true,'
    '"engine_build":"vllm 0.32.0",'
    '"engine_flags":"none",'
    '"hash_algorithm":"blake3",'
    '"hf_overrides":"none",'
    '"kv_cache_dtype":"bfloat16",'
    '"kv_cache_scales":"none",'
    '"kv_geometry":"32*full(heads=8,k=128,v=128)",'
    '"l2_format":"raw",'
    '"lmcache_version":"0.5.6",'
    '"max_model_len":131072,'
    '"model_config_sha256":"5555555555555555555555555555555555555555555555555555555555555555",'
    '"model_dtype":"bfloat16",'
    '"model_id":"HF/Smol",'
    '"model_revision":"0123456789abcdef0123456789abcdef01234567",'
    '"object_groups":false,'
    '"pipeline_parallel_size":1,'
    '"quantization":"none",'
    r'"rope":"{\"rope_theta\":500000.0}",'
    '"schema":1,'
    '"speculative_config":"none",'
    '"tensor_parallel_size":1,'
    '"tokenizer_name":"org/tokenizer",'
    '"tokenizer_revision":"2222222222222222222222222222222222222222",'
    '"tokenizer_sha256":"3333333333333333333333333333333333333333333333333333333333333333",'
    '"weights_sha256":"1111111111111111111111111111111111111111111111111111111111111111"}'
)
GOLDEN_NAMESPACE_TP1 = "kvp-129049f317c48a8a544a443194dcc608"
TP1 = {"tensor_parallel_size": 1, "block_size": 32, "enforce_eager": True, "device": "cpu", "model_id": "HF/Smol"}


def changed(name: str, value: Any) -> Any:
    """Another valid value of a field."""
    kind = FIELDS[name].kind
    if kind == "bool":
        return not value
    if kind == "int":
        return value + 1
    if kind == "kv_dtype":
        return "fp8"
    if kind in ("hex40", "hex64"):
        return value[:-1] + ("0" if value[-1] != "0" else "1")
    return value + "x"


def test_golden_canonical_json(identity: Make) -> None:
    assert identity().canonical_json() == GOLDEN_JSON
    assert identity(**TP1).canonical_json() == GOLDEN_JSON_TP1


def test_golden_namespace(identity: Make) -> None:
    assert identity().namespace() == GOLDEN_NAMESPACE
    assert identity(**TP1).namespace() == GOLDEN_NAMESPACE_TP1


@pytest.mark.parametrize(
    ("text", "namespace"), [(GOLDEN_JSON, GOLDEN_NAMESPACE), (GOLDEN_JSON_TP1, GOLDEN_NAMESPACE_TP1)]
)
def test_the_golden_namespace_is_the_digest_of_the_golden_json(text: str, namespace: str) -> None:
    assert "kvp-" + hashlib.sha256(text.encode("ascii")).hexdigest()[:32] == namespace
    assert NAMESPACE_PATTERN.match(namespace)


SOURCES_NOW = dict.fromkeys(FIELDS, "given")


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_namespace(name: str, identity: Make) -> None:
    base = identity()
    other = dataclasses.replace(base, **{name: changed(name, getattr(base, name))})
    assert other.namespace() != base.namespace()
    assert differences(base, other) == [(name, getattr(base, name), getattr(other, name))]


def test_the_order_of_the_arguments_does_not_matter(identity: Make) -> None:
    backwards = dict(reversed(identity().as_dict().items()))
    assert list(backwards) != list(identity().as_dict())
    assert Identity(**backwards).canonical_json() == GOLDEN_JSON


def runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False, timeout=20).returncode == 0


# Every Python that a host may have and this machine has: on the PATH, or kept by pyenv.
MINORS = range(9, 15)
PYTHONS = sorted(
    {
        sys.executable,
        *(path for path in (shutil.which(f"python3.{minor}") for minor in MINORS) if path is not None and runs(path)),
        *(str(path) for minor in MINORS for path in Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")),
    }
)


def hard_identities() -> list[dict[str, Any]]:
    """Fields whose canonical form could depend on the Python, the locale or the order: escapes, planes, sizes."""
    texts = [
        "\u00e4",
        "a\u0308",
        "\U0001f600",
        '"\\',
        "\u2028",
        "\x7f",
        "true",
        "1.0",
        "1e5",
        " ",
        "\u0435",
        "\uffff",
        "/",
    ]
    numbers = [1, 2**31, 2**53 + 1, 10**12 - 1]
    made = []
    for number, text in enumerate(texts):
        values = identity_from_env(GOLDEN_ENV, "f").as_dict()
        for name, field in FIELDS.items():
            if field.kind == "text":
                values[name] = text
            elif field.kind == "int":
                values[name] = numbers[number % len(numbers)]
            elif field.kind == "bool":
                values[name] = bool(number % 2)
        made.append(dict(reversed(values.items())) if number % 2 else values)
    return made


@pytest.mark.parametrize(("seed", "locale"), [("1", "C"), ("2", "C.UTF-8")])
@pytest.mark.parametrize("python", PYTHONS)
def test_neither_python_nor_its_hash_seed_nor_the_locale_matters(python: str, seed: str, locale: str) -> None:
    program = (
        "import json,sys; from kvpersist.core.identity import Identity; "
        "made = [Identity(**fields) for fields in json.load(sys.stdin)]; "
        "json.dump([[one.canonical_json(), one.namespace()] for one in made], sys.stdout)"
    )
    fields = [identity_from_env(GOLDEN_ENV, "f").as_dict(), *hard_identities()]
    run = subprocess.run(
        [python, "-B", "-c", program],
        input=json.dumps(fields),
        env={
            "PYTHONPATH": str(Path(kvpersist.__file__).parents[1]),
            "PYTHONHASHSEED": seed,
            "LC_ALL": locale,
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONUTF8": "0",
            "PATH": os.defpath,
        },
        capture_output=True,
        check=True,
        text=True,
        timeout=20,
    )
    made = json.loads(run.stdout)
    assert made[0] == [GOLDEN_JSON, GOLDEN_NAMESPACE]
    assert made == [[one.canonical_json(), one.namespace()] for one in (Identity(**each) for each in fields)]


TEXT = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters=[chr(code) for code in range(32)]),
    min_size=1,
    max_size=12,
)
KINDS: Mapping[str, st.SearchStrategy[Any]] = {
    "text": TEXT,
    "hex40": st.text("0123456789abcdef", min_size=40, max_size=40),
    "hex64": st.text("0123456789abcdef", min_size=64, max_size=64),
    "int": st.integers(1, 10**12 - 1),
    "bool": st.booleans(),
    "kv_dtype": st.sampled_from(KV_CACHE_DTYPES),
}
IDENTITIES = st.builds(Identity, **{name: KINDS[field.kind] for name, field in FIELDS.items()})
# Values that look alike across fields and types, where a sloppy canonical form would let two sets meet.
ALIKE = st.sampled_from(["1", "true", "a", "a,b", 'a","b', "a\\", "null", "\u00e4", "a\u0308", "\\u00e4"])


@given(IDENTITIES)
def test_the_file_is_read_back_to_the_same_identity(one: Identity) -> None:
    again = identity_from_env(one.render(SOURCES_NOW), "identity.env.local")
    assert again == one
    assert again.canonical_json() == one.canonical_json()


@given(IDENTITIES)
def test_the_canonical_form_tells_every_field_with_its_type(one: Identity) -> None:
    content = json.loads(one.canonical_json())
    assert content.pop("schema") == 1
    assert content == one.as_dict()
    assert {name: type(value) for name, value in content.items()} == {
        name: type(value) for name, value in one.as_dict().items()
    }
    assert one.canonical_json().isascii()
    assert NAMESPACE_PATTERN.match(one.namespace())


@given(IDENTITIES, st.randoms(use_true_random=False))
def test_the_canonical_form_does_not_depend_on_the_order_of_the_fields(one: Identity, draw: random.Random) -> None:
    shuffled = list(one.as_dict().items())
    draw.shuffle(shuffled)
    assert Identity(**dict(shuffled)).canonical_json() == one.canonical_json()


@given(IDENTITIES, IDENTITIES)
def test_two_identities_share_a_canonical_form_only_when_they_are_equal(one: Identity, other: Identity) -> None:
    assert (one.canonical_json() == other.canonical_json()) == (one == other)
    assert (one.namespace() == other.namespace()) == (one == other)


@given(IDENTITIES, st.sampled_from(sorted(FIELDS)), st.data())
def test_one_changed_field_of_any_identity_changes_form_and_namespace(
    one: Identity, name: str, data: st.DataObject
) -> None:
    value = data.draw(KINDS[FIELDS[name].kind].filter(lambda value: value != getattr(one, name)))
    other = dataclasses.replace(one, **{name: value})
    assert other.canonical_json() != one.canonical_json()
    assert other.namespace() != one.namespace()
    assert [each[0] for each in differences(one, other)] == [name]


@given(IDENTITIES, st.sampled_from(sorted(BACKENDS)))
def test_every_namespace_fits_what_the_adapters_make_of_it(one: Identity, backend: str) -> None:
    namespace = one.namespace()
    assert re.fullmatch(r"kvp-[0-9a-f]{32}", namespace)
    assert not any(separator in namespace for separator in ("@", "--", "-SEP-", "/", "_"))
    path = model_path("/models", "mimo-pro", namespace, BACKENDS[backend].longest_model_path)
    assert layout.scope(path) == layout.folder(layout.scope(path)) == namespace
    # nixl leaves the least room for the model path, about 135 characters (lmcache 0.5.6).
    assert len(path.replace("/", "-SEP-")) <= 135


TEXT_FIELDS = [name for name, field in FIELDS.items() if field.kind == "text"]


@given(
    st.fixed_dictionaries(dict.fromkeys(TEXT_FIELDS, ALIKE)), st.fixed_dictionaries(dict.fromkeys(TEXT_FIELDS, ALIKE))
)
def test_two_different_sets_of_fields_never_share_a_canonical_form(one: dict[str, str], other: dict[str, str]) -> None:
    base = identity_from_env(GOLDEN_ENV, "f")
    first, second = dataclasses.replace(base, **one), dataclasses.replace(base, **other)
    assert (first.canonical_json() == second.canonical_json()) == (one == other)
    assert (first.namespace() == second.namespace()) == (one == other)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model_revision", "main", "KVP_MODEL_REVISION must be a full 40-hex SHA, not 'main'"),
        ("model_revision", "A" * 40, "KVP_MODEL_REVISION must be a full 40-hex SHA"),
        ("model_revision", "a" * 39, "KVP_MODEL_REVISION must be a full 40-hex SHA"),
        ("model_revision", "a" * 40 + "\n", "KVP_MODEL_REVISION must be a full 40-hex SHA"),
        ("tokenizer_revision", "v1", "KVP_TOKENIZER_REVISION must be a full 40-hex SHA"),
        ("weights_sha256", "a" * 40, "KVP_WEIGHTS_SHA256 must be 64 hex"),
        ("tokenizer_sha256", "g" * 64, "KVP_TOKENIZER_SHA256 must be 64 hex"),
        ("chat_template_sha256", "0x12", "KVP_CHAT_TEMPLATE_DIGEST must be 64 hex, not '0x12'"),
        ("model_id", "", "KVP_MODEL_ID is empty"),
        ("model_id", 5, "KVP_MODEL_ID is empty"),
        ("model_id", "a\nb", "KVP_MODEL_ID has a control character"),
        ("model_id", "\ud83d", "KVP_MODEL_ID has a control character, a lone surrogate"),
        ("rope", "x" * 4097, "KVP_ROPE has a control character, a lone surrogate or more than 4096 characters"),
        ("kv_cache_dtype", "auto", "KVP_KV_CACHE_DTYPE must be one of float16, bfloat16"),
        ("kv_cache_dtype", "fp16", "KVP_KV_CACHE_DTYPE must be one of float16, bfloat16"),
        ("block_size", 0, "KVP_BLOCK_SIZE must be a positive whole number, not 0"),
        ("block_size", "16", "KVP_BLOCK_SIZE must be a positive whole number, not '16'"),
        ("block_size", True, "KVP_BLOCK_SIZE must be a positive whole number, not True"),
        ("tensor_parallel_size", -1, "KVP_TENSOR_PARALLEL_SIZE must be a positive whole number, not -1"),
        ("enforce_eager", 1, "KVP_ENFORCE_EAGER must be true or false, not 1"),
    ],
)
def test_a_wrong_field_is_named(name: str, value: Any, message: str, identity: Make) -> None:
    with pytest.raises(UsageError) as caught:
        identity(**{name: value})
    assert message in caught.value.cause
    assert caught.value.exit_code == EXIT_USAGE


def test_all_wrong_fields_are_named_at_once(identity: Make) -> None:
    with pytest.raises(UsageError, match=r"KVP_MODEL_ID is empty; .*KVP_WEIGHTS_SHA256 must be 64 hex.*KVP_BLOCK_SIZE"):
        identity(model_id="", weights_sha256="x", block_size=0)


def test_the_file_names_every_field_with_its_meaning(identity: Make) -> None:
    text = identity().render(SOURCES_NOW)
    assert list(parse(text, "f")) == [*(field.env_name for field in FIELDS.values()), "KVP_IDENTITY_SOURCES"]
    for field in FIELDS.values():
        assert f"\n# {field.meaning}\n{field.env_name}=" in text
    assert len({field.env_name for field in FIELDS.values()}) == len(FIELDS)


def test_how_each_field_is_known_is_recorded_and_no_part_of_the_namespace(identity: Make) -> None:
    sources = {name: list(SOURCES)[number % len(SOURCES)] for number, name in enumerate(FIELDS)}
    text = identity().render(sources)
    assert sources_from_env(text, "f") == sources
    assert identity_from_env(text, "f").namespace() == identity().namespace() == GOLDEN_NAMESPACE
    assert sources_from_env(GOLDEN_ENV, "f") == {}
    assert sources_from_env("KVP_IDENTITY_SOURCES='rope=guessed other=given codec=given codec'\n", "f") == {
        "codec": "given"
    }


@pytest.mark.parametrize(
    ("mode", "settings", "expected"),
    [
        ("host", {}, {"model_revision": "derived", "kv_cache_dtype": "derived", "engine_build": "engine"}),
        ("host", {"kvp_model_revision": "a" * 40}, {"model_revision": "given", "tokenizer_revision": "given"}),
        ("host", {"vllm_engine_kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "given", "lmcache_version": "engine"}),
        ("docker", {}, {"engine_build": "image", "lmcache_version": "image", "connector": "fixed"}),
    ],
)
def test_the_settings_decide_how_a_field_is_known(
    deploy: Any, mode: str, settings: dict[str, Any], expected: dict[str, str]
) -> None:
    sources = field_sources(deploy(mode, **settings).engine)
    assert list(sources) == list(FIELDS)
    assert set(sources.values()) <= set(SOURCES)
    assert {name: sources[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (None, "none"),
        ({}, "none"),
        ({"quant_method": "awq", "kv_cache_scheme": None}, "none"),
        ({"kv_cache_quant_algo": "FP8", "group_size": 16}, '{"kv_cache_quant_algo":"FP8"}'),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, '{"kv_cache_scheme":{"num_bits":8,"type":"float"}}'),
    ],
)
def test_kv_quantization_of_config_json_is_told(quantization: dict[str, Any] | None, text: str) -> None:
    assert kv_cache_scales(quantization) == text


@pytest.mark.parametrize("env_name", [field.env_name for field in FIELDS.values()])
def test_a_missing_or_empty_field_of_the_file_is_named(env_name: str, identity: Make) -> None:
    lines = identity().render(SOURCES_NOW).splitlines()
    message = (
        f"reading /etc/kvp/identity.env.local: {env_name} is missing or empty. Run the playbook with --tags identity"
    )
    for replacement in ("", f"{env_name}="):
        text = "\n".join(replacement if line.startswith(f"{env_name}=") else line for line in lines)
        with pytest.raises(UsageError) as caught:
            identity_from_env(text, "/etc/kvp/identity.env.local")
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("KVP_BLOCK_SIZE=16", "KVP_BLOCK_SIZE=sixteen", "KVP_BLOCK_SIZE must be a whole number, not 'sixteen'"),
        ("KVP_BLOCK_SIZE=16", "KVP_BLOCK_SIZE=-16", "KVP_BLOCK_SIZE must be a whole number, not '-16'"),
        ("KVP_BLOCK_SIZE=16", "KVP_BLOCK_SIZE=0", "KVP_BLOCK_SIZE must be a positive whole number, not 0"),
        ("KVP_ENFORCE_EAGER=0", "KVP_ENFORCE_EAGER=false", "KVP_ENFORCE_EAGER must be 0 or 1, not 'false'"),
        ("KVP_ENFORCE_EAGER=0", "KVP_ENFORCE_EAGER=2", "KVP_ENFORCE_EAGER must be 0 or 1, not '2'"),
        ("KVP_KV_CACHE_DTYPE=bfloat16", "KVP_KV_CACHE_DTYPE=bf16", "KVP_KV_CACHE_DTYPE must be one of"),
        ("KVP_DEVICE=cuda", "KVP_DEVICE=cu da", "the value of KVP_DEVICE has a space"),
    ],
)
def test_a_wrong_line_of_the_file_is_named(old: str, new: str, message: str) -> None:
    assert f"\n{old}\n" in GOLDEN_ENV
    with pytest.raises(UsageError) as caught:
        identity_from_env(GOLDEN_ENV.replace(f"\n{old}\n", f"\n{new}\n"), "/etc/kvp/identity.env.local")
    assert str(caught.value).startswith("reading /etc/kvp/identity.env.local")
    assert message in str(caught.value)


def test_comments_and_line_ends_do_not_change_the_identity(identity: Make) -> None:
    noisy = "# hello\r\n" + GOLDEN_ENV.replace("# ", "## ").replace("\n", "\r\n") + "OTHER=1\r\n"
    assert identity_from_env(noisy, "f") == identity()


@pytest.mark.parametrize(
    ("given_dtype", "model_dtype", "quantization", "resolved"),
    [
        ("auto", "bfloat16", None, "bfloat16"),
        ("auto", "float16", {}, "float16"),
        ("auto", "bfloat16", {"quant_method": "awq"}, "bfloat16"),
        ("auto", "bfloat16", {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ("auto", "bfloat16", {"kv_cache_quant_algo": "FP8"}, "bfloat16"),
        ("fp8_e5m2", "bfloat16", {"kv_cache_quant_algo": "FP8"}, "fp8_e5m2"),
        *((dtype, "float32", None, dtype) for dtype in KV_CACHE_DTYPES),
    ],
)
def test_the_kv_dtype_is_resolved_as_vllm_does(
    given_dtype: str, model_dtype: str, quantization: dict[str, Any] | None, resolved: str
) -> None:
    assert resolve_kv_cache_dtype(given_dtype, model_dtype, quantization) == resolved


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("float8", "fp8"), ("e4m3", "fp8_e4m3")],
)
def test_a_misspelled_dtype_is_answered_with_the_right_spelling(wrong: str, right: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_kv_cache_dtype(wrong, "bfloat16", None)
    assert str(caught.value) == (
        f"resolving the KV cache dtype {wrong!r}: vLLM does not accept {wrong!r}. Write {right}."
    )


@pytest.mark.parametrize(
    ("given_dtype", "model_dtype", "quantization", "named"),
    [
        ("int8", "bfloat16", None, "'int8'"),
        ("", "bfloat16", None, "''"),
        ("FP8", "bfloat16", None, "'FP8'"),
        ("auto", "float32", None, "'float32'"),
        ("auto", "bfloat16", {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "'nvfp4'"),
    ],
)
def test_an_unsupported_dtype_is_named_with_what_is_supported(
    given_dtype: str, model_dtype: str, quantization: dict[str, Any] | None, named: str
) -> None:
    with pytest.raises(UsageError, match=f"{named} is not supported. Use auto or one of float16, bfloat16, fp8"):
        resolve_kv_cache_dtype(given_dtype, model_dtype, quantization)


NAMESPACE = "kvp-" + "0" * 32


def test_the_model_path_ends_in_family_and_namespace() -> None:
    assert model_path("/models", "mimo-pro", NAMESPACE, 172) == f"/models/mimo-pro/{NAMESPACE}"
    assert model_path("/models/", "mimo-pro", NAMESPACE, 172) == f"/models/mimo-pro/{NAMESPACE}"


@pytest.mark.parametrize("separator", ["@", "--", "-SEP-"])
@pytest.mark.parametrize("where", ["models_dir", "family", "namespace"])
def test_separators_of_lmcache_are_refused_anywhere(separator: str, where: str) -> None:
    parts = {"models_dir": "/models", "family": "mimo", "namespace": NAMESPACE}
    parts[where] += f"{separator}x"
    with pytest.raises(UsageError, match=f"LMCache uses '{separator}' as a separator in file names"):
        model_path(**parts, longest=1000)


@pytest.mark.parametrize("family", ["", "a/b", "..", ".hidden", "-x", "a b", "ü", "a\n"])
def test_a_family_that_is_not_one_plain_name_is_refused(family: str) -> None:
    with pytest.raises(UsageError, match="is not one plain name"):
        model_path("/models", family, NAMESPACE, 172)


@pytest.mark.parametrize("namespace", ["", "a/b", "..", "../../etc", "a b", "-x"])
def test_a_namespace_that_is_not_one_plain_name_is_refused(namespace: str) -> None:
    """The operator may override it; the path must still lead into the folder of models."""
    with pytest.raises(UsageError, match="is not one plain name"):
        model_path("/models", "mimo", namespace, 172)


@pytest.mark.parametrize(
    ("backend", "of_slash", "of_letter"),
    [("kvpersist", 1, 2), ("fs_native", 5, 2), ("fs", 5, 2), ("nixl_store_dynamic", 2, 2), ("raw_block", 3, 6)],
)
@given(depth=st.integers(1, 30), width=st.integers(1, 10))
def test_the_length_limit_counts_bytes_as_the_backend_spells_them(
    backend: str, of_slash: int, of_letter: int, depth: int, width: int
) -> None:
    folder, spell = "".join("/" + "é" * width for _ in range(depth)), BACKENDS[backend].spell
    path = f"{folder}/mimo/{NAMESPACE}"
    length = (depth + 2) * of_slash + depth * width * of_letter + len("mimo") + len(NAMESPACE)
    assert model_path(folder, "mimo", NAMESPACE, length, spell) == path
    with pytest.raises(UsageError, match=f"it takes {length} bytes .* where {length - 1} fit. Set kvp_models_dir"):
        model_path(folder, "mimo", NAMESPACE, length - 1, spell)


GOLDEN_ENV = """\
# Identity of this deployment. Its namespace: kvpersist model-name

# Model id.
KVP_MODEL_ID='org/Modèle 7B'

# Revision, given or cut from the weights fingerprint.
KVP_MODEL_REVISION=0123456789abcdef0123456789abcdef01234567

# SHA-256 over names and SHA-256 of all weight shards.
KVP_WEIGHTS_SHA256=1111111111111111111111111111111111111111111111111111111111111111

# Tokenizer id.
KVP_TOKENIZER_NAME=org/tokenizer

# Tokenizer revision.
KVP_TOKENIZER_REVISION=2222222222222222222222222222222222222222

# SHA-256 over names and SHA-256 of the tokenizer files.
KVP_TOKENIZER_SHA256=3333333333333333333333333333333333333333333333333333333333333333

# SHA-256 of the chat template.
KVP_CHAT_TEMPLATE_DIGEST=4444444444444444444444444444444444444444444444444444444444444444

# SHA-256 of config.json, less its origin, and of the model's own code.
KVP_MODEL_CONFIG_SHA256=5555555555555555555555555555555555555555555555555555555555555555

# Dtype of the model.
KVP_MODEL_DTYPE=bfloat16

# KV dtype as vLLM spells it, resolved.
KVP_KV_CACHE_DTYPE=bfloat16

# KV quantization that config.json names, or none; its scales are part of the weights.
KVP_KV_CACHE_SCALES=none

# KV heads and dimensions of every layer.
KVP_KV_GEOMETRY='32*full(heads=8,k=128,v=128)'

# Position-encoding fields of config.json.
KVP_ROPE='{"rope_theta":500000.0}'

# Engine arguments that override config.json, RoPE among them, or none.
KVP_HF_OVERRIDES=none

# Quantization of config.json, or none.
KVP_QUANTIZATION=none

# Tokens per KV block.
KVP_BLOCK_SIZE=16

# Tokens per KV chunk.
KVP_CHUNK_SIZE=256

# Longest context in tokens.
KVP_MAX_MODEL_LEN=131072

# Tensor parallel size.
KVP_TENSOR_PARALLEL_SIZE=4

# Pipeline parallel size.
KVP_PIPELINE_PARALLEL_SIZE=1

# Decode context parallel size.
KVP_DECODE_CONTEXT_PARALLEL_SIZE=1

# Attention backend where the engine arguments pin one, or none.
KVP_ATTENTION_BACKEND=none

# Speculative decoding (MTP among it) of the engine arguments, or none.
KVP_SPECULATIVE_CONFIG=none

# Whether the engine runs without compiled graphs.
KVP_ENFORCE_EAGER=0

# Further engine arguments that may change the KV, or none.
KVP_ENGINE_FLAGS=none

# Whether LMCache separates object groups.
KVP_OBJECT_GROUPS=0

# Hash of LMCache's chunk keys.
KVP_HASH_ALGORITHM=blake3

# What the engine computes on.
KVP_DEVICE=cuda

# vLLM distribution and version, or the image's digest.
KVP_ENGINE_BUILD='vllm 0.32.0'

# LMCache version.
KVP_LMCACHE_VERSION=0.5.6

# Module of the KV connector.
KVP_CONNECTOR=lmcache.integration.vllm.lmcache_mp_connector

# Codec of the L2 tier.
KVP_CODEC=none

# Format of the L2 tier's files.
KVP_L2_FORMAT=raw
"""
