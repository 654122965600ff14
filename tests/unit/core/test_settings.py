"""The table of settings: typing, rendering, reading back, and its own consistency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core.envfile import parse
from kvpersist.core.errors import EXIT_USAGE, UsageError
from kvpersist.core.settings import (
    BY_VARIABLE,
    CACHE_ENV,
    ENGINE_ENV,
    FILES,
    LANGUAGES,
    ROLE_VARIABLES,
    SERVER_ENV,
    SETTINGS,
    Setting,
    Value,
    documentation,
    read_files,
    render_file,
    rendered_in,
    to_text,
    validate,
)

MODEL = {"kvp_model_dir": "/data/llama", "kvp_model_id": "org/Llama", "kvp_model_family": "llama"}
FOLDER = "/etc/kvpersist"
by_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.variable)


def rendered(values: dict[str, Value]) -> dict[str, str]:
    return {name: render_file(name, values) for name in FILES}


@by_setting
def test_a_setting_has_a_meaning_in_three_languages(setting: Setting) -> None:
    assert LANGUAGES == ("en", "ru", "zh")
    texts = [setting.meaning.text(language) for language in LANGUAGES]
    assert all(text.strip() == text and text and "\n" not in text for text in texts)
    assert len(set(texts)) == 3
    assert texts[0][-1] == texts[1][-1] == "."
    assert texts[2][-1] == "。"
    assert any("а" <= character <= "я" for character in texts[1].lower())
    assert any("\u4e00" <= character <= "\u9fff" for character in texts[2])


@by_setting
def test_a_default_is_a_valid_value_of_its_type(setting: Setting) -> None:
    if setting.required and not setting.default:
        with pytest.raises(UsageError, match=f"{setting.variable} is empty"):
            validate({**MODEL, setting.variable: setting.default}, "testing")
        return
    typed = validate({**MODEL, setting.variable: setting.default}, "testing")[setting.variable]
    assert typed == setting.default
    assert type(typed) is {"int": int, "float": float, "bool": bool}.get(setting.kind, str)


def test_variables_are_declared_once_and_belong_to_a_role() -> None:
    assert len(BY_VARIABLE) == len(SETTINGS)
    assert {setting.role for setting in SETTINGS} == {"kvp_common", "cache_server", "vllm_engine"}
    prefixes = {"kvp_common": "kvp_", "cache_server": "cache_server_", "vllm_engine": "vllm_engine_"}
    assert [s.variable for s in SETTINGS if not s.variable.startswith(prefixes[s.role])] == []


def test_choices_belong_to_choices_and_bounds_to_numbers() -> None:
    assert [s.variable for s in SETTINGS if (s.kind == "choice") != bool(s.choices)] == []
    numbers = ("int", "float")
    assert [s.variable for s in SETTINGS if s.minimum is not None and s.kind not in numbers] == []
    assert [s.variable for s in SETTINGS if s.kind in numbers and s.minimum is None] == []


@pytest.mark.parametrize("file", FILES)
def test_names_are_unique_in_a_file(file: str) -> None:
    names = [name for _, name in rendered_in(file)]
    assert names
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_one_name_never_means_two_settings_in_two_files() -> None:
    owners: dict[str, set[str]] = {}
    for file in FILES:
        for setting, name in rendered_in(file):
            owners.setdefault(name, set()).add(setting.variable)
    assert {name: who for name, who in owners.items() if len(who) > 1} == {}


def test_all_but_the_folder_itself_can_be_read_back_from_the_files() -> None:
    assert [setting.variable for setting in SETTINGS if not setting.renders] == ["kvp_config_dir"]


@pytest.mark.parametrize(
    ("variable", "sides"),
    [
        ("kvp_cache_host", {CACHE_ENV: "KVP_LMCACHE_HOST", SERVER_ENV: "LMCACHE_HOST", ENGINE_ENV: "KV_PERSIST_HOST"}),
        ("kvp_cache_port", {CACHE_ENV: "KVP_LMCACHE_PORT", SERVER_ENV: "LMCACHE_PORT", ENGINE_ENV: "KV_PERSIST_PORT"}),
    ],
)
def test_both_sides_of_the_connection_come_from_one_setting(variable: str, sides: dict[str, str]) -> None:
    assert dict(BY_VARIABLE[variable].renders) == sides


def test_validate_names_every_wrong_value_in_one_line() -> None:
    wrong: dict[str, Any] = {
        **MODEL,
        "kvp_model_dir": "",
        "kvp_home": "opt/kvpersist",
        "kvp_device": "tpu",
        "kvp_cache_port": 70000,
        "kvp_chunk_size": "many",
        "kvp_cache_budget_gb": 0,
        "cache_server_evict_ratio": 1.5,
        "vllm_engine_kv_persist": "perhaps",
        "vllm_engine_extra_args": "a\nb",
        "kvp_model_id": 5,
        "kvp_prot": 1,
    }
    with pytest.raises(UsageError) as caught:
        validate(wrong, "rendering tp4.env")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("rendering tp4.env: kvp_prot is not a setting (did you mean kvp_")
    for part in (
        "kvp_model_dir is empty",
        "kvp_home must be an absolute path, not 'opt/kvpersist'",
        "kvp_device must be one of cuda, cpu, not 'tpu'",
        "kvp_cache_port must be at most 65535, not 70000",
        "kvp_chunk_size must be a whole number, not 'many'",
        "kvp_cache_budget_gb must be at least 0.001, not 0",
        "cache_server_evict_ratio must be at most 1, not 1.5",
        "vllm_engine_kv_persist must be 0 or 1, not 'perhaps'",
        "vllm_engine_extra_args has a line break or a control character",
        "kvp_model_id must be text, not 5",
    ):
        assert part in message
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kvp_cache_budgt_gb", "kvp_cache_budgt_gb is not a setting (did you mean kvp_cache_budget_gb?)"),
        ("kvp_l2_backend", "kvp_l2_backend is not a setting (did you mean cache_server_l2_backend?)"),
        (
            "vllm_engine_max_num_seq",
            "vllm_engine_max_num_seq is not a setting (did you mean vllm_engine_max_num_seqs?)",
        ),
        ("kvp_common_start_timeut", "(did you mean kvp_common_start_timeout?)"),
        ("kvp_zzzzzzzzzzzz", "kvp_zzzzzzzzzzzz is not a setting. "),
    ],
)
def test_an_unknown_variable_of_the_inventory_is_named_with_the_nearest_that_is_known(name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate(MODEL, "testing", [*MODEL, name])
    assert words in str(caught.value)


def test_all_unknown_variables_are_listed_beside_the_wrong_values() -> None:
    with pytest.raises(UsageError) as caught:
        validate({**MODEL, "kvp_device": "tpu"}, "testing", ["kvp_modle_dir", "kvp_cache_prot", "kvp_device"])
    assert str(caught.value) == (
        "testing: kvp_cache_prot is not a setting (did you mean kvp_cache_port?); "
        "kvp_modle_dir is not a setting (did you mean kvp_model_dir?); kvp_device must be one of cuda, cpu, not 'tpu'. "
        "Correct these variables in the inventory."
    )


def test_settings_and_variables_of_roles_are_known() -> None:
    assert validate(MODEL, "testing", [*BY_VARIABLE, *ROLE_VARIABLES]) == validate(MODEL, "testing")
    assert not ROLE_VARIABLES & set(BY_VARIABLE)


def test_unknown_names_in_the_files_are_listed_and_those_in_the_wrong_file_sent_home(
    values: Callable[..., dict[str, Value]],
) -> None:
    texts = rendered(values())
    texts[ENGINE_ENV] += "MAX_MODEL_LENGTH=4096\nKVP_CHUNK_SIZE=256\n"
    texts[CACHE_ENV] += "KVP_EVICT_RATE=0.5\nQQQQ=1\n"
    with pytest.raises(UsageError) as caught:
        read_files(texts, {}, FOLDER)
    assert str(caught.value) == (
        "reading /etc/kvpersist: cache.env.local's KVP_EVICT_RATE is not a setting (did you mean KVP_EVICT_RATIO?); "
        "cache.env.local's QQQQ is not a setting; "
        "tp4.env's MAX_MODEL_LENGTH is not a setting (did you mean MAX_MODEL_LEN?); "
        "tp4.env's KVP_CHUNK_SIZE belongs into cache.env.local. "
        "Correct these lines, or let the playbook write the files again."
    )


@pytest.mark.parametrize(
    ("variable", "given_value", "typed"),
    [
        ("kvp_cache_port", "5556", 5556),
        ("kvp_cache_budget_gb", "1.5", 1.5),
        ("kvp_cache_budget_gb", 2, 2.0),
        ("vllm_engine_kv_persist", "no", False),
        ("vllm_engine_kv_persist", "TRUE", True),
        ("vllm_engine_kv_persist", 0, False),
        ("vllm_engine_kv_persist", "1", True),
        ("kvp_cache_port", None, 5555),
    ],
)
def test_values_take_their_type(variable: str, given_value: Any, typed: Value) -> None:
    value = validate({**MODEL, variable: given_value}, "testing")[variable]
    assert value == typed
    assert type(value) is type(typed)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("kvp_cache_port", "5_555"),  # Python's own spelling of numbers is nobody else's
        ("kvp_cache_budget_gb", "1_5"),
        ("kvp_cache_port", 5555.5),
        ("kvp_cache_port", "0x15b3"),
        ("kvp_cache_port", ""),
        ("kvp_cache_port", True),
        ("kvp_cache_budget_gb", True),
        ("kvp_cache_budget_gb", "nan"),
        ("kvp_cache_budget_gb", "inf"),
        ("kvp_cache_budget_gb", "1e999"),
        ("kvp_cache_budget_gb", []),
        ("vllm_engine_kv_persist", 2),
        ("vllm_engine_kv_persist", ""),
        ("kvp_device", "CPU"),
        ("kvp_home", ""),
    ],
)
def test_values_of_another_type_are_refused(variable: str, value: Any) -> None:
    with pytest.raises(UsageError, match=variable):
        validate({**MODEL, variable: value}, "testing")


@pytest.mark.parametrize("path", ["/models", "/models/", "//models", "///models//", "/x/../models/."])
def test_a_path_has_one_spelling(path: str) -> None:
    """It becomes part of keys and is compared with what runs."""
    assert validate({**MODEL, "kvp_models_dir": path}, "testing")["kvp_models_dir"] == "/models"


@pytest.mark.parametrize("bound", ["minimum", "maximum"])
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.minimum is not None], ids=lambda s: s.variable)
def test_a_bound_is_the_last_value_that_is_accepted(setting: Setting, bound: str) -> None:
    limit = getattr(setting, bound)
    if limit is None:
        assert bound == "maximum"
        return
    beyond = limit + (1 if bound == "maximum" else -1) * (1 if setting.kind == "int" else 1e-6)
    assert validate({**MODEL, setting.variable: limit}, "testing")[setting.variable] == limit
    with pytest.raises(UsageError, match=f"{setting.variable} must be at {'most' if bound == 'maximum' else 'least'}"):
        validate({**MODEL, setting.variable: beyond}, "testing")


def strategy(setting: Setting) -> st.SearchStrategy[Value]:
    """Every value that a setting may have."""
    text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=[chr(code) for code in range(32)]))
    if setting.kind == "choice":
        return st.sampled_from(setting.choices)
    if setting.kind == "bool":
        return st.booleans()
    if setting.kind == "int":
        return st.integers(int(setting.minimum or 0), int(setting.maximum or 10**9))
    if setting.kind == "float":
        return st.floats(setting.minimum, setting.maximum or 1e12)
    if setting.kind == "path":
        return text.map(lambda rest: "/" + rest)
    return text.filter(bool) if setting.required else text


@given(st.fixed_dictionaries({setting.variable: strategy(setting) for setting in SETTINGS}))
def test_what_is_rendered_is_read_back(raw: dict[str, Value]) -> None:
    values = validate(raw, "testing")
    assert read_files(rendered(values), {}, str(values["kvp_config_dir"])) == values


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("file", FILES)
def test_languages_change_the_comments_and_nothing_else(
    file: str, language: str, values: Callable[..., dict[str, Value]]
) -> None:
    english, other = render_file(file, values()), render_file(file, values(), language)
    assert parse(other, file) == parse(english, file)
    for setting, name in rendered_in(file):
        above, _, _ = other.partition(f"\n{name}=")
        comment = above.rsplit("\n\n", 1)[1]
        assert comment.startswith(f"# {setting.meaning.text(language)}")
        assert comment.count("\n# ") == bool(setting.choices)
        assert not setting.choices or comment.endswith("\n# " + " | ".join(setting.choices))


def test_two_files_that_contradict_each_other_are_refused(values: Callable[..., dict[str, Value]]) -> None:
    texts = rendered(values())
    texts[ENGINE_ENV] = texts[ENGINE_ENV].replace("KV_PERSIST_PORT=5555", "KV_PERSIST_PORT=5556")
    with pytest.raises(UsageError) as caught:
        read_files(texts, {}, FOLDER)
    assert str(caught.value) == (
        "reading /etc/kvpersist: lmcache-server.env's LMCACHE_PORT is '5555' but tp4.env's KV_PERSIST_PORT is '5556'. "
        "They are one setting: set kvp_cache_port in the inventory and run the playbook again."
    )


def test_the_environment_wins_over_files(values: Callable[..., dict[str, Value]]) -> None:
    read = read_files(rendered(values()), {"KV_PERSIST": "0", "MAX_NUM_SEQS": "7", "UNRELATED": "x"}, FOLDER)
    assert (read["vllm_engine_kv_persist"], read["vllm_engine_max_num_seqs"]) == (False, 7)


def test_the_environment_on_one_side_only_is_a_contradiction(values: Callable[..., dict[str, Value]]) -> None:
    with pytest.raises(UsageError, match="the environment's KV_PERSIST_PORT is '6000'"):
        read_files(rendered(values()), {"KV_PERSIST_PORT": "6000"}, FOLDER)
    both = {"KVP_LMCACHE_PORT": "6000", "LMCACHE_PORT": "6000", "KV_PERSIST_PORT": "6000"}
    assert read_files(rendered(values()), both, FOLDER)["kvp_cache_port"] == 6000


def test_the_environment_is_checked_like_a_file(values: Callable[..., dict[str, Value]]) -> None:
    with pytest.raises(UsageError, match="vllm_engine_port must be at most 65535"):
        read_files(rendered(values()), {"ENGINE_PORT": "99999"}, FOLDER)


def test_an_unreadable_line_is_named_with_its_folder(values: Callable[..., dict[str, Value]]) -> None:
    with pytest.raises(UsageError, match=r"reading /etc/kvpersist/tp4\.env line 1: "):
        read_files({**rendered(values()), ENGINE_ENV: "KV PERSIST=1\n"}, {}, FOLDER)


def test_files_without_the_model_are_refused() -> None:
    with pytest.raises(UsageError, match="kvp_model_dir is empty; kvp_model_id is empty; kvp_model_family is empty"):
        read_files(dict.fromkeys(FILES, ""), {}, FOLDER)


def test_an_unknown_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Use one of cache\.env\.local, lmcache-server\.env, tp4\.env\."):
        rendered_in("tp8.env")


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "1"), (False, "0"), (64.0, "64"), (0.9, "0.9"), (0.0, "0"), (8, "8"), ("a", "a"), (1e-7, "1e-07")],
)
def test_values_as_text(value: Value, text: str) -> None:
    assert to_text(value) == text


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_reference_has_a_row_for_every_setting(language: str) -> None:
    rows = list(documentation(language))
    assert [row[0] for row in rows] == [setting.variable for setting in SETTINGS]
    assert [row[4] for row in rows] == [setting.meaning.text(language) for setting in SETTINGS]
    assert dict(zip(BY_VARIABLE, rows))["kvp_cache_port"][1:4] == (
        "int",
        "5555",
        "KVP_LMCACHE_PORT (cache.env.local), LMCACHE_PORT (lmcache-server.env), KV_PERSIST_PORT (tp4.env)",
    )
