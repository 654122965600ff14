"""vLLM's command line is read the way vLLM reads it, in every spelling it knows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core.engine_args import (
    HARMLESS,
    OWNED,
    check_extra_args,
    layout_flags,
    parse_options,
    positive_option,
)
from kvpersist.core.errors import EXIT_USAGE, UsageError


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ([], {}),
        (["--seed", "3"], {"--seed": ["3"]}),
        (["--seed=3"], {"--seed": ["3"]}),
        (["--max_model_len", "4096"], {"--max-model-len": ["4096"]}),
        (["--max_model_len=4096"], {"--max-model-len": ["4096"]}),
        (["--max-model_len", "4_096"], {"--max-model-len": ["4_096"]}),
        (["-tp", "4"], {"--tensor-parallel-size": ["4"]}),
        (["-tp=4"], {"--tensor-parallel-size": ["4"]}),
        (["-pp", "2"], {"--pipeline-parallel-size": ["2"]}),
        (["-dcp", "2"], {"--decode-context-parallel-size": ["2"]}),
        (["-dp", "2"], {"--data-parallel-size": ["2"]}),
        (["-q", "awq"], {"--quantization": ["awq"]}),
        (["-cc", "{}"], {"--compilation-config": ["{}"]}),
        (["-sc", "{}"], {"--speculative-config": ["{}"]}),
        (["-ac", "{}"], {"--attention-config": ["{}"]}),
        (["-ep"], {"--enable-expert-parallel": [""]}),
        (["-O", "3"], {"--optimization-level": ["3"]}),
        (["-O3"], {"--optimization-level": ["3"]}),
        (["-O=3"], {"--optimization-level": ["3"]}),
        (["--enforce-eager"], {"--enforce-eager": [""]}),
        (["--enforce-eager", "--seed", "3"], {"--enforce-eager": [""], "--seed": ["3"]}),
        (["--seed", "-1"], {"--seed": ["-1"]}),
        (["--scale", "-.5"], {"--scale": ["-.5"]}),
        (["--cpu-offload-params", "A", "B"], {"--cpu-offload-params": ["A B"]}),
        (["--seed", "1", "--seed=2"], {"--seed": ["1", "2"]}),
        (["-tp", "1", "--tensor_parallel_size=2"], {"--tensor-parallel-size": ["1", "2"]}),
        (["--hf-overrides", '{"a-b": "c=d"}'], {"--hf-overrides": ['{"a-b": "c=d"}']}),
        (['--hf-overrides={"a": "b=c"}'], {"--hf-overrides": ['{"a": "b=c"}']}),
        (["--hf_overrides.rope_theta", "5"], {"--hf-overrides.rope_theta": ["5"]}),
        (["--seed="], {"--seed": [""]}),
        (["--seed=3", "stray"], {"--seed": ["3"]}),
        (["/venv/bin/python", "-m", "vllm.x", "--seed", "3"], {"-m": ["vllm.x"], "--seed": ["3"]}),
        (["serve", "model", "--seed", "3"], {"--seed": ["3"]}),
    ],
)
def test_every_spelling_of_an_option_is_read(argv: list[str], options: dict[str, list[str]]) -> None:
    assert parse_options(argv) == options


NAMES = st.from_regex(r"[a-z]{2,8}(-[a-z]{1,8}){0,2}", fullmatch=True)
OPTION_VALUES = st.text("abcXYZ0189./:{}\"' =_", min_size=1).filter(lambda text: text[0] != "-")


@given(st.dictionaries(NAMES, OPTION_VALUES), st.data())
def test_spelling_does_not_change_what_is_read(options: dict[str, str], data: st.DataObject) -> None:
    plain, spelled = [], []
    for name, value in options.items():
        plain += [f"--{name}", value]
        other = f"--{name.replace('-', '_')}" if data.draw(st.booleans()) else f"--{name}"
        spelled += [f"{other}={value}"] if data.draw(st.booleans()) else [other, value]
    assert parse_options(plain) == parse_options(spelled) == {f"--{name}": [value] for name, value in options.items()}


@pytest.mark.parametrize("option", sorted(OWNED))
@pytest.mark.parametrize("spell", ["{} 1", "{}=1", "{}.x 1"])
def test_an_option_with_its_own_variable_is_refused_in_extra_arguments(option: str, spell: str) -> None:
    for name in (option, "--" + option[2:].replace("-", "_")):
        with pytest.raises(UsageError, match=f"{option}.* has a variable of their own") as caught:
            check_extra_args(["--seed", "1", *spell.format(name).split()])
        assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["-tp", "2"], "--tensor-parallel-size has a variable"),
        (["-tp=2"], "--tensor-parallel-size has a variable"),
        (["--no-enforce-eager"], "--no-enforce-eager has a variable"),
        (["--port", "1", "--host=x"], "--host, --port have a variable"),
        (["--api-key", "secret"], "--api-key has a variable"),
        # vLLM's parser takes an unambiguous beginning for the whole name (0.32.0, argparse's allow_abbrev).
        (["--kv-cache-d", "fp8"], "--kv-cache-d has a variable"),
        (["--kv_cache_dt=fp8"], "--kv-cache-dt has a variable"),
        (["--api-k=secret"], "--api-k has a variable"),
        (["-t", "2"], "-t has a variable"),
        (["--no-enforce-e"], "--no-enforce-e has a variable"),
    ],
)
def test_no_spelling_gets_past_the_owner(argv: list[str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_extra_args(argv)
    assert named in str(caught.value)


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        check_extra_args(["--api-key=hunter2", "--api-key", "hunter3"])
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "x.yaml"],
        ["--config=x.yaml"],
        ["--seed", "1", "--config", "x.yaml"],
        ["--dtype", "float32"],
        ["--dt=float32"],
        ["--hf_config_path", "/elsewhere"],
        ["--lora-modules", "a=/elsewhere"],
        ["--tokenizer", "/elsewhere"],
    ],
)
def test_what_brings_in_something_from_outside_the_identity_is_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=r"what --.* brings in would be no part of the identity"):
        check_extra_args(argv)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--seed", "3"],
        ["--no-enable-prefix-caching"],
        ["--config-format", "hf"],
        ["--hf-overrides", "{}"],
        ["--kv-cache-dtype-skip-layers", "0"],
        ["--max-num-batched-tokens", "2048"],
        ["--tokenizer-mode", "auto"],
        ["-O3"],
    ],
)
def test_other_extra_arguments_are_accepted(argv: list[str]) -> None:
    check_extra_args(argv)


@pytest.mark.parametrize("argv", [["3", "--seed"], ["seed=3"], ["-1"], ["-"]])
def test_extra_arguments_start_with_an_option(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=r"is not an option\. Start with an option"):
        check_extra_args(argv)


@pytest.mark.parametrize(
    ("argv", "size"), [([], 1), (["-pp", "2"], 2), (["-pp", "2", "--pipeline_parallel_size=2"], 2), (["-pp=16"], 16)]
)
def test_a_parallel_size_is_read_and_defaults_to_1(argv: list[str], size: int) -> None:
    assert positive_option(parse_options(argv), "--pipeline-parallel-size") == size


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["-pp", "0"], "'0'"),
        (["-pp", "-1"], "'-1'"),
        (["-pp", "two"], "'two'"),
        (["-pp"], "''"),
        (["-pp", "2.0"], "'2.0'"),
        (["-pp", "1", "-pp", "2"], "1"),
        (["-pp", "1", "-pp", "2"], "2"),
        (["-pp", "9999999999"], "'9999999999'"),
    ],
)
def test_a_wrong_or_contradictory_parallel_size_is_refused(argv: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=r"reading --pipeline-parallel-size: .*Give one positive number") as caught:
        positive_option(parse_options(argv), "--pipeline-parallel-size")
    assert named in caught.value.cause


@pytest.mark.parametrize("name", sorted(HARMLESS | OWNED))
def test_what_has_its_own_field_or_cannot_change_kv_is_no_flag(name: str) -> None:
    assert layout_flags({name: ["1"]}) == "none"


def test_nothing_is_both_owned_and_harmless() -> None:
    assert frozenset() == OWNED & HARMLESS
    assert {name for name in OWNED | HARMLESS if parse_options([name]) != {name: [""]}} == set()


@given(st.dictionaries(NAMES.map(lambda name: f"--x{name}"), st.lists(OPTION_VALUES, min_size=1), min_size=1))
def test_every_other_option_with_every_value_is_part_of_the_flags(options: dict[str, list[str]]) -> None:
    text = layout_flags(options)
    assert json.loads(text) == options
    assert text == layout_flags(dict(reversed(options.items())))
    assert layout_flags({**options, "--max-num-batched-tokens": ["1"]}) == text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--dtype", "half"], ["--dtype", "float"]),
        (["--dtype", "half"], []),
        (["--dtype", "half"], ["--dtype", "half", "--dtype", "half"]),
        (["--a", "1", "--b", "2"], ["--a", "2", "--b", "1"]),
        (["--a", "x y"], ["--a", "x", "y", "z"]),
        (["--some-flag"], ["--no-some-flag"]),
    ],
)
def test_different_flags_are_told_apart(one: list[str], other: list[str]) -> None:
    assert layout_flags(parse_options(one)) != layout_flags(parse_options(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["-q", "awq"], ["--quantization=awq"]),
        (["--hf_overrides", "{}", "--seed=1"], ["--seed", "1", "--hf-overrides={}"]),
        (["-O3"], ["--optimization-level", "3"]),
        (["--seed", "1", "--enable-chunked-prefill"], ["--seed", "1", "--max-num-batched-tokens", "99"]),
    ],
)
def test_the_same_flags_in_another_spelling_are_the_same(one: list[str], other: list[str]) -> None:
    assert layout_flags(parse_options(one)) == layout_flags(parse_options(other))
