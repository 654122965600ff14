"""One declaration, many places: roles and reference pages say what ``core.settings`` says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Callable

import pytest
import yaml
from kvpersist.cli.docs import write_docs
from kvpersist.core.envfile import parse
from kvpersist.core.settings import ENGINE_ENV, LANGUAGES, ROLE_VARIABLES, SETTINGS, Setting, rendered_in, to_text

ROOT = Path(__file__).parents[2]
ROLES = ROOT / "roles"
# The entry point of each role's argument_specs.yml that documents its settings.
ENTRIES = {"kvp_common": "install", "cache_server": "main", "vllm_engine": "main"}
ANSIBLE_TYPES = {"path": "str", "choice": "str"}

every_owner = pytest.mark.parametrize("role", ENTRIES)
every_role = pytest.mark.parametrize("role", sorted(path.name for path in ROLES.iterdir() if path.is_dir()))


def read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(content, dict)
    return content


def defaults_of(role: str) -> dict[str, Any]:
    path = ROLES / role / "defaults" / "main.yml"
    return read(path) if path.exists() else {}


def specs_of(role: str) -> dict[str, Any]:
    path = ROLES / role / "meta" / "argument_specs.yml"
    return read(path)["argument_specs"] if path.exists() else {}


def settings_of(role: str) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.role == role]


def same(one: Any, other: Any) -> bool:
    """Equal and of one type: 1 is neither 1.0 nor true."""
    return type(one) is type(other) and one == other


def setting_differences(role: str, defaults: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Where a role's defaults and options say something else than the settings it owns."""
    found = []
    for setting in settings_of(role):
        name = setting.variable
        if name not in defaults or not same(defaults[name], setting.default):
            found.append(f"{name}: default is {defaults.get(name)!r} in defaults/main.yml and {setting.default!r}")
        option = options.get(name, {})
        expected = {
            "type": ANSIBLE_TYPES.get(setting.kind, setting.kind),
            "default": setting.default,
            "choices": list(setting.choices) or None,
            "description": setting.meaning.en,
        }
        found += [
            f"{name}: {key} is {option.get(key)!r} in argument_specs.yml and {value!r} in core.settings"
            for key, value in expected.items()
            if not same(option.get(key), value)
        ]
    names = [setting.variable for setting in settings_of(role)]
    if [name for name in options if name in names] != names:
        found.append("argument_specs.yml does not have the order of core.settings")
    if [name for name in defaults if name in names] != names:
        found.append("defaults/main.yml does not have the order of core.settings")
    own = {*defaults, *options} - set(names)
    return found + [
        f"{name} is not a setting and not the role's own" for name in own if not name.startswith(f"{role}_")
    ]


def default_differences(role: str, defaults: dict[str, Any], specs: dict[str, Any]) -> list[str]:
    """Where a role's defaults/main.yml and its argument_specs.yml disagree."""
    options = {name: option for entry in specs.values() for name, option in entry.get("options", {}).items()}
    found = [f"{name} has a default but no specification" for name in defaults.keys() - options.keys()]
    for name, option in options.items():
        if "default" in option and name not in defaults:
            found.append(f"{name} is specified with a default but has none")
        elif "default" in option and not same(option["default"], defaults[name]):
            found.append(f"{name}: default is {defaults[name]!r} and specified as {option['default']!r}")
        elif "default" not in option and name in defaults:
            found.append(f"{name} has a default that is not specified")
        if not option.get("description") or not option.get("type"):
            found.append(f"{name} has no description or no type")
        if not name.startswith((f"{role}_", "kvp_")):
            found.append(f"{name} starts neither with {role}_ nor with kvp_")
    return found


@every_owner
def test_a_role_s_settings_are_those_of_core(role: str) -> None:
    assert settings_of(role)
    assert setting_differences(role, defaults_of(role), specs_of(role)[ENTRIES[role]]["options"]) == []


@every_role
def test_every_role_s_defaults_are_those_it_specifies(role: str) -> None:
    assert default_differences(role, defaults_of(role), specs_of(role)) == []


def test_the_list_that_collects_settings_from_the_inventory_is_complete() -> None:
    names = read(ROLES / "kvp_common" / "vars" / "main.yml")["_kvp_common_setting_names"]
    assert names == [setting.variable for setting in SETTINGS]


@every_role
def test_a_role_s_constants_start_with_its_name(role: str) -> None:
    path = ROLES / role / "vars" / "main.yml"
    names = read(path) if path.exists() else {}
    assert [name for name in names if not name.startswith((f"_{role}_", f"{role}_", "kvp_"))] == []


GENERATED = [
    name
    for suffix in ("", ".ru", ".zh")
    for name in (f"configuration{suffix}.md", f"reuse{suffix}.md", f"{ENGINE_ENV}.example{suffix}")
]


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_files_are_what_the_generator_writes(name: str, tmp_path: Path) -> None:
    write_docs(str(tmp_path))
    page = ROOT / "docs" / name
    assert page.is_file(), f"{page} is missing; run make docs"
    assert page.read_text("utf-8") == (tmp_path / name).read_text("utf-8"), "run make docs"


def test_the_generator_writes_every_file_and_nothing_else(tmp_path: Path) -> None:
    assert [Path(path).name for path in write_docs(str(tmp_path))] == GENERATED
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(GENERATED)
    committed = [
        path.name for kind in ("configuration*", "reuse*", "*.example*") for path in (ROOT / "docs").glob(kind)
    ]
    assert sorted(committed) == sorted(GENERATED)


def example(language: str) -> str:
    suffix = "" if language == "en" else f".{language}"
    return (ROOT / "docs" / f"{ENGINE_ENV}.example{suffix}").read_text("utf-8")


def test_the_examples_have_every_variable_with_its_default_in_the_order_of_the_declaration() -> None:
    values = {name: to_text(setting.default) for setting, name in rendered_in(ENGINE_ENV)}
    assert list(parse(example("en"), "example").items()) == list(values.items())


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_examples_differ_in_their_comments_only(language: str) -> None:
    def kinds(text: str) -> list[str]:
        return ["#" if line.startswith("#") else line for line in text.splitlines()]

    assert kinds(example(language)) == kinds(example("en"))
    comments = [line for line in example(language).splitlines() if line.startswith("#")]
    for setting, _ in rendered_in(ENGINE_ENV):
        assert f"# {setting.meaning.text(language)}" in comments


Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda defaults, _: defaults.update(cache_server_log_level="DEBUG"), "cache_server_log_level: default is"),
        (lambda defaults, _: defaults.update(cache_server_l1_size_gb=64), "cache_server_l1_size_gb: default is 64 in"),
        (lambda defaults, _: defaults.pop("cache_server_image"), "cache_server_image: default is None in"),
        (lambda _, options: options.pop("cache_server_image"), "cache_server_image: type is None"),
        (lambda _, options: options["cache_server_image"].update(type="path"), "cache_server_image: type is 'path'"),
        (lambda _, options: options["cache_server_image"].update(default="x"), "cache_server_image: default is 'x'"),
        (lambda _, options: options["cache_server_log_level"].update(choices=["INFO"]), "choices is ['INFO']"),
        (lambda _, options: options["cache_server_image"].update(choices=["a"]), "choices is ['a']"),
        (lambda _, options: options["cache_server_image"].update(description="Other."), "description is 'Other.'"),
        (lambda defaults, _: defaults.update(kvp_new=1), "kvp_new is not a setting and not the role's own"),
        (
            lambda _, options: options.update(cache_server_venv=options.pop("cache_server_venv")),
            "does not have the order",
        ),
    ],
)
def test_a_role_that_says_something_else_than_core_is_found(change: Change, complaint: str) -> None:
    defaults = copy.deepcopy(defaults_of("cache_server"))
    options = copy.deepcopy(specs_of("cache_server")["main"]["options"])
    change(defaults, options)
    assert any(complaint in difference for difference in setting_differences("cache_server", defaults, options))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda defaults, _: defaults.update(recovery_timeout=1), "recovery_timeout: default is 1 and specified"),
        (lambda defaults, _: defaults.update(recovery_new=1), "recovery_new has a default but no specification"),
        (lambda defaults, _: defaults.pop("recovery_timeout"), "recovery_timeout is specified with a default"),
        (lambda _, options: options["recovery_timeout"].pop("default"), "has a default that is not specified"),
        (lambda _, options: options["recovery_timeout"].pop("description"), "has no description or no type"),
        (lambda _, options: options.update(timeout={"type": "int", "description": "x"}), "timeout starts neither"),
    ],
)
def test_defaults_that_differ_from_their_specification_are_found(change: Change, complaint: str) -> None:
    defaults, specs = copy.deepcopy(defaults_of("recovery")), copy.deepcopy(specs_of("recovery"))
    assert default_differences("recovery", defaults, specs) == []
    change(defaults, specs["main"]["options"])
    assert any(complaint in difference for difference in default_differences("recovery", defaults, specs))


def names_of(tasks: Any) -> set[str]:
    """Variables that a list of tasks registers, sets or passes on, blocks included."""
    found: set[str] = set()
    for task in tasks:
        facts = task.get("ansible.builtin.set_fact") or {}
        found |= {task.get("register", ""), *facts, *task.get("vars", {})}
        for part in ("block", "rescue", "always"):
            found |= names_of(task.get(part, []))
    return found


def test_preflight_knows_every_variable_of_the_roles_that_is_called_like_a_setting() -> None:
    found: set[str] = set()
    for role in (path for path in ROLES.iterdir() if path.is_dir()):
        constants = role / "vars" / "main.yml"
        found |= {*defaults_of(role.name), *(read(constants) if constants.exists() else {})}
        found |= {name for entry in specs_of(role.name).values() for name in entry.get("options", {})}
        for path in (role / "tasks").glob("*.yml"):
            found |= names_of(yaml.safe_load(path.read_text("utf-8")))
    alike = {name for name in found if name.startswith(("cache_server_", "kvp_", "vllm_engine_"))}
    assert alike - {setting.variable for setting in SETTINGS} == ROLE_VARIABLES
