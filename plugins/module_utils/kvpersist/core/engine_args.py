"""vLLM's command line, read the way vLLM reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence

from .errors import UsageError

# Short and alternative names (vllm 0.32.0, vllm/engine/arg_utils.py).
_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
}

# Set by their own variables; a second value in extra arguments would contradict them.
OWNED = frozenset(
    {
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--tensor-parallel-size",
        "--max-num-seqs",
        "--max-model-len",
        "--kv-cache-dtype",
        "--block-size",
        "--enforce-eager",
        "--no-enforce-eager",
        "--gpu-memory-utilization",
        "--kv-transfer-config",
        "--offload-backend",
        "--cpu-offload-gb",
        # A secret on a command line is readable by every user of the host.
        "--api-key",
    }
)

# What these bring in lies outside the model's folder, or changes what the identity takes from it: nothing covers it.
UNCOVERED = frozenset(
    {
        "--config",
        "--dtype",
        "--enable-lora",
        "--hf-config-path",
        "--lora-modules",
        "--revision",
        "--tokenizer",
        "--tokenizer-revision",
    }
)

# Arguments known not to change one byte of KV: scheduling, logging, parsing of answers. Every other argument counts as
# one that may, and becomes part of the identity.
HARMLESS = frozenset(
    {
        "--enable-prefix-caching",
        "--no-enable-prefix-caching",
        "--enable-chunked-prefill",
        "--no-enable-chunked-prefill",
        "--enable-prompt-tokens-details",
        "--max-num-batched-tokens",
        "--disable-log-stats",
        "--enable-log-requests",
        "--no-enable-log-requests",
        "--uvicorn-log-level",
        "--disable-uvicorn-access-log",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "--reasoning-parser",
        "--generation-config",
        "--cpu-offload-params",
        "--disable-custom-all-reduce",
    }
)

# Options with an identity field of their own: field by option.
_FIELDS_OF_OPTIONS = {
    "--hf-overrides": "hf_overrides",
    "--rope-scaling": "hf_overrides",
    "--rope-theta": "hf_overrides",
    "--attention-backend": "attention_backend",
    "--attention-config": "attention_backend",
    "--speculative-config": "speculative_config",
    "--spec-method": "speculative_config",
    "--spec-model": "speculative_config",
    "--spec-tokens": "speculative_config",
}
OPTION_FIELDS = tuple(dict.fromkeys(_FIELDS_OF_OPTIONS.values()))
_NUMBER_FIELDS = ("--pipeline-parallel-size", "--decode-context-parallel-size")


def parse_options(argv: Sequence[str]) -> dict[str, list[str]]:
    """Options of a vLLM command line.

    Args:
        argv: the arguments; words before the first option are skipped.

    Returns:
        For each option, in the long spelling with dashes, its value in every place where it stands; several words
        after one option are joined by a space, an option without a value has an empty one.
    """
    options: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in argv:
        if _is_option(word):
            name, separator, value = _split_level(word).partition("=")
            name = _canonical(name)
            current = options.setdefault(name, [])
            current.append(value)
            if separator:
                current = None
        elif current is not None:
            current[-1] = f"{current[-1]} {word}" if current[-1] else word
    return options


def check_extra_args(extra_args: Sequence[str]) -> None:
    """Refuses extra arguments that have a variable of their own, in every spelling and abbreviation vLLM accepts.

    Raises:
        UsageError: naming them.
    """
    if extra_args and not _is_option(extra_args[0]):
        raise UsageError(
            "reading vllm_engine_extra_args",
            f"{extra_args[0]!r} is not an option",
            "Start with an option, --name value.",
        )
    options = parse_options(extra_args)
    uncovered = sorted(name for name in options if _stands_for(name, UNCOVERED))
    if uncovered:
        raise UsageError(
            "reading vllm_engine_extra_args",
            f"what {', '.join(uncovered)} brings in would be no part of the identity",
            "Leave it out, or make it part of the model's folder.",
        )
    owned = sorted(name for name in options if _stands_for(name, OWNED))
    if owned:
        raise UsageError(
            "reading vllm_engine_extra_args",
            f"{', '.join(owned)} {'has' if len(owned) == 1 else 'have'} a variable of their own",
            "Set that variable instead (see docs/configuration.md).",
        )


def positive_option(options: Mapping[str, Sequence[str]], name: str) -> int:
    """Value of an option that is a positive whole number and defaults to 1.

    Raises:
        UsageError: when it is something else, or is given twice with different values.
    """
    values = set(options.get(name, ("1",)))
    value = values.pop()
    if values or not re.match(r"[1-9][0-9]{0,8}\Z", value):
        raise UsageError(
            f"reading {name}", f"its value is {' and '.join([value, *sorted(values)])!r}", "Give one positive number."
        )
    return int(value)


def option_fields(options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Options that may change the KV, as one canonical text for each of :data:`OPTION_FIELDS` and ``engine_flags``.

    ``none`` stands for no such option; ``engine_flags`` has those without a field of their own.
    """
    found: dict[str, dict[str, list[str]]] = {field: {} for field in (*OPTION_FIELDS, "engine_flags")}
    for name, values in options.items():
        if name not in HARMLESS and name not in OWNED and name not in _NUMBER_FIELDS:
            # --option.key sets one key of an option's JSON value
            field = _FIELDS_OF_OPTIONS.get(name.partition(".")[0], "engine_flags")
            found[field][name] = list(values)
    return {
        field: json.dumps(content, sort_keys=True, separators=(",", ":")) if content else "none"
        for field, content in found.items()
    }


def layout_flags(options: Mapping[str, Sequence[str]]) -> str:
    """The field ``engine_flags``; see :func:`option_fields`."""
    return option_fields(options)["engine_flags"]


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not re.match(r"-[0-9.]", word)


def _canonical(name: str) -> str:
    if name in _ALIASES:
        return _ALIASES[name]
    option, dot, key = name.partition(".")  # --option.key value sets one key of a JSON value
    return option.replace("_", "-") + dot + key if name.startswith("--") else name


def _split_level(word: str) -> str:
    """``-O3`` and ``-O=3`` as ``-O=3``."""
    return f"-O={word[2:].lstrip('=')}" if word.startswith("-O") and word != "-O" else word


def _stands_for(name: str, options: Collection[str]) -> bool:
    """Whether vLLM's parser may take this for one of the options: argparse accepts any unambiguous beginning of a name.

    A beginning that is the whole name of another option stands for that one.
    """
    option = name.partition(".")[0]
    names = [*options, *(short for short, long in _ALIASES.items() if long in options)]
    return option not in HARMLESS and any(known.startswith(option) for known in names)
