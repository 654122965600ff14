"""Ansible modules: what they document is what they accept, and they hold nothing else."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "library").glob("*.py"))
DOCUMENTS = ("DOCUMENTATION", "EXAMPLES", "RETURN")
# An option's properties, with what Ansible takes where one is missing.
PROPERTIES = {"type": "str", "required": False, "default": None, "choices": None, "elements": None, "aliases": None}
SUPPORT = ("full", "partial", "none", "N/A")

_module_utils = str(ROOT / "plugins" / "module_utils")
if _module_utils not in ansible.module_utils.__path__:
    # First, since the environment may hold a link to another checkout.
    ansible.module_utils.__path__.insert(0, _module_utils)

every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"contract_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def option_differences(documented: dict[str, Any], accepted: dict[str, Any], path: str = "") -> list[str]:
    """Where documentation and argument specification disagree."""
    found = [f"{path}{name} is documented but not accepted" for name in documented.keys() - accepted.keys()]
    found += [f"{path}{name} is accepted but not documented" for name in accepted.keys() - documented.keys()]
    for name in sorted(documented.keys() & accepted.keys()):
        for key, fallback in PROPERTIES.items():
            said, done = documented[name].get(key, fallback), accepted[name].get(key, fallback)
            if said != done or type(said) is not type(done):
                found.append(f"{path}{name}: {key} is documented as {said!r} and is {done!r}")
        if not documented[name].get("description"):
            found.append(f"{path}{name} has no description")
        nested = documented[name].get("suboptions", {}), accepted[name].get("options", {})
        found += option_differences(*nested, f"{path}{name}.")
    return found


def documentation_problems(module: ModuleType, name: str) -> list[str]:
    """What is wrong with DOCUMENTATION, EXAMPLES and RETURN."""
    documentation = yaml.safe_load(module.DOCUMENTATION)
    options = documentation.get("options", {})
    found = option_differences(options, module.ARGUMENT_SPEC)
    if documentation.get("module") != name:
        found.append(f"the documentation is that of {documentation.get('module')!r}")
    found += [key for key in ("short_description", "description", "author") if not documentation.get(key)]
    attributes = documentation.get("attributes", {})
    for attribute in ("check_mode", "diff_mode"):
        if attributes.get(attribute, {}).get("support") not in SUPPORT:
            found.append(f"attribute {attribute} is missing")
        elif not attributes[attribute].get("description"):
            found.append(f"attribute {attribute} has no description")
    return found + _example_problems(yaml.safe_load(module.EXAMPLES), name, options) + _return_problems(module)


def _example_problems(examples: Any, name: str, options: dict[str, Any]) -> list[str]:
    if not isinstance(examples, list) or not any(name in task for task in examples):
        return [f"EXAMPLES has no task with {name}"]
    found = [f"task {number} of EXAMPLES has no name" for number, task in enumerate(examples) if not task.get("name")]
    for task in examples:
        used = task.get(name)
        if used is not None:
            required = {option for option, properties in options.items() if properties.get("required")}
            found += [f"EXAMPLES use the unknown option {option}" for option in sorted(set(used) - set(options))]
            found += [f"EXAMPLES leave out the required option {option}" for option in sorted(required - set(used))]
    return found


def _return_problems(module: ModuleType) -> list[str]:
    values = yaml.safe_load(module.RETURN)
    if not isinstance(values, dict) or not values:
        return ["RETURN names no value"]
    return [
        f"RETURN: {name} has no {key}"
        for name, value in values.items()
        for key in ("description", "returned", "type", *(("elements",) if value.get("type") == "list" else ()))
        if not value.get(key)
    ]


def structure_problems(source: str) -> list[str]:
    """What a module holds beside documentation, argument specification and one exception boundary."""
    tree = ast.parse(source)
    found = [f"line {node.lineno}: {ast.unparse(node)[:60]}" for node in tree.body if not _belongs(node)]
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef))]
    if [getattr(node, "name", "") for node in functions] != ["main"]:
        found.append("main is not the only function")
    boundaries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    handlers = [ast.unparse(handler.type) if handler.type else "" for node in boundaries for handler in node.handlers]
    if len(boundaries) != 1 or handlers != ["KvpError"]:
        found.append(f"the exception boundary is not one `except KvpError`: {handlers}")
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if call.startswith("AnsibleModule(")]
    if len(made) != 1 or "argument_spec=ARGUMENT_SPEC" not in made[0] or "supports_check_mode=True" not in made[0]:
        found.append("AnsibleModule is not made once, of ARGUMENT_SPEC and with check mode")
    if not source.startswith("#!/usr/bin/python\n"):
        found.append("the first line is not #!/usr/bin/python, which Ansible replaces")
    return found


def _belongs(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        names = [ast.unparse(target) for target in node.targets]
        return len(names) == 1 and names[0] in (*DOCUMENTS, "ARGUMENT_SPEC", "REQUIRED_IF", "MUTUALLY_EXCLUSIVE")
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if isinstance(node, ast.If):
        return ast.unparse(node) == "if __name__ == '__main__':\n    main()"
    return isinstance(node, (ast.ImportFrom, ast.FunctionDef))


@every_module
def test_documentation_equals_the_argument_specification(path: Path) -> None:
    assert documentation_problems(load(path), path.stem) == []


@every_module
def test_a_module_is_documentation_specification_and_one_boundary(path: Path) -> None:
    assert structure_problems(path.read_text("utf-8")) == []


def test_every_file_of_the_library_is_a_module_of_this_project() -> None:
    assert MODULES
    assert [path.name for path in (ROOT / "library").iterdir() if path.is_file() and path not in MODULES] == []
    assert [path.name for path in MODULES if not path.name.startswith("kvp_")] == []


# A module that keeps every rule; each case below breaks one.
SPECIMEN = '''#!/usr/bin/python
"""Ansible module: a specimen."""

DOCUMENTATION = r"""
module: kvp_x
short_description: A specimen
description: A specimen.
options:
  settings: {description: Values., type: dict, required: true}
  state: {description: What it should be., type: str, choices: [on, off], default: on}
  parts: {description: Parts., type: list, elements: str}
author: [kvpersist authors]
attributes:
  check_mode: {description: Predicts., support: full}
  diff_mode: {description: None., support: none}
"""

EXAMPLES = r"""
- name: Do it
  kvp_x:
    settings: {}
"""

RETURN = r"""
path: {description: Where., returned: success, type: str}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvpersist.core.errors import KvpError

ARGUMENT_SPEC = {
    "settings": {"type": "dict", "required": True},
    "state": {"type": "str", "choices": [True, False], "default": True},
    "parts": {"type": "list", "elements": "str"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        module.exit_json(changed=False)
    except KvpError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
'''


def specimen(folder: Path, old: str = "", new: str = "") -> tuple[ModuleType, str]:
    assert old in SPECIMEN
    source = SPECIMEN.replace(old, new, 1) if old else SPECIMEN
    path = folder / "kvp_x.py"
    path.write_text(source, "utf-8")
    return load(path), source


def test_the_specimen_keeps_every_rule(tmp_path: Path) -> None:
    module, source = specimen(tmp_path)
    assert documentation_problems(module, "kvp_x") == []
    assert structure_problems(source) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("module: kvp_x", "module: kvp_y", "the documentation is that of 'kvp_y'"),
        ("required: true}", "required: false}", "settings: required is documented as False and is True"),
        ('"type": "dict"', '"type": "str"', "settings: type is documented as 'dict' and is 'str'"),
        ("default: on}", "default: off}", "state: default is documented as False and is True"),
        ("default: on}", "default: 1}", "state: default is documented as 1 and is True"),
        ("[on, off]", "[on]", "state: choices"),
        ("elements: str}", "elements: int}", "parts: elements is documented as 'int' and is 'str'"),
        ("  parts: {", "  pieces: {", "pieces is documented but not accepted"),
        ('    "parts": {"type": "list", "elements": "str"},\n', "", "parts is documented but not accepted"),
        ("description: Parts.", "description: ''", "parts has no description"),
        ("short_description: A specimen\n", "", "short_description"),
        ("  check_mode: {description: Predicts., support: full}\n", "", "attribute check_mode is missing"),
        ("support: none", "support: maybe", "attribute diff_mode is missing"),
        ("    settings: {}\n", "    settings: {}\n    stat: on\n", "EXAMPLES use the unknown option stat"),
        ("    settings: {}\n", "    state: on\n", "EXAMPLES leave out the required option settings"),
        ("  kvp_x:\n", "  kvp_y:\n", "EXAMPLES has no task with kvp_x"),
        ("returned: success, ", "", "RETURN: path has no returned"),
        ("returned: success, type: str}", "returned: success, type: list}", "RETURN: path has no elements"),
    ],
)
def test_documentation_that_says_something_else_is_found(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    module, _ = specimen(tmp_path, old, new)
    assert any(complaint in problem for problem in documentation_problems(module, "kvp_x"))


@pytest.mark.parametrize("document", ["EXAMPLES", "RETURN", "DOCUMENTATION"])
def test_documentation_that_is_no_yaml_is_found(document: str, tmp_path: Path) -> None:
    module, _ = specimen(tmp_path, f'{document} = r"""\n', f'{document} = r"""\n- a: [\n')
    with pytest.raises(yaml.YAMLError):
        documentation_problems(module, "kvp_x")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("\n\ndef main", "\n\ndef helper():\n    pass\n\n\ndef main", "main is not the only function"),
        ("\n\ndef main", "\n\nclass Helper:\n    pass\n\n\ndef main", "class Helper"),
        ("\n\ndef main", "\n\nLIMIT = 3\n\n\ndef main", "LIMIT = 3"),
        ("\n\ndef main", "\n\nprint(1)\n\n\ndef main", "print(1)"),
        ("\n\ndef main", "\n\nimport json\n\n\ndef main", "import json"),
        ("except KvpError as error", "except Exception as error", "['Exception']"),
        ("except KvpError as error", "except (KvpError, OSError) as error", "['(KvpError, OSError)']"),
        (
            "    try:\n        module.exit_json",
            "    try:\n        pass\n    except OSError:\n        pass\n    try:\n        module.exit_json",
            "['OSError', 'KvpError']",
        ),
        (", supports_check_mode=True", "", "with check mode"),
        ("argument_spec=ARGUMENT_SPEC", "argument_spec={}", "of ARGUMENT_SPEC"),
        ("#!/usr/bin/python\n", "#!/usr/bin/env python3\n", "the first line"),
    ],
)
def test_a_module_that_holds_more_is_found(old: str, new: str, complaint: str) -> None:
    assert old in SPECIMEN
    assert any(complaint in problem for problem in structure_problems(SPECIMEN.replace(old, new, 1)))
