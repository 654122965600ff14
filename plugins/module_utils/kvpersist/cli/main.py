"""``kvpersist``: what people type on the host. Thin: arguments in, core and host do the work, rich prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Callable, NoReturn

from rich.console import Console
from rich.table import Table

from .. import __version__
from ..core.commands import served_path
from ..core.deployment import Deployment
from ..core.errors import EXIT_ERROR, EXIT_OK, EXIT_PREFLIGHT, KvpError
from ..core.identity import SOURCES
from ..core.recovery import SCENARIOS, exit_code, summary_rows
from ..core.settings import to_text
from ..host.deployment import load_deployment, load_identity, load_sources, load_values
from ..host.gate import run_gate
from ..host.hashing import HashCache
from ..host.history import entries, named, stored_under
from ..host.identity import HASH_CACHE, explained, namespace_of, verified_identity
from ..host.launch import launch_cache, launch_engine
from ..host.model_folder import hash_model
from ..host.preflight import preflight_problems, preflight_warnings
from ..host.recovery import Plan, last_result, run_recovery
from ..host.services import resolved_manager, service_manager
from .docs import write_docs
from .progress import hashing_progress

# Without a terminal nothing may be folded at 80 columns: a value that is cut cannot be searched for.
_OUT = Console(highlight=False, width=None if sys.stdout.isatty() else 400)
_ERR = Console(stderr=True, highlight=False)

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point; exits with 0 ok, 2 usage, 3 preflight failed, 4 mismatch, 5 inconclusive, 1 anything else."""
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
    except KvpError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"ERROR: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        code = EXIT_ERROR
    except OSError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"ERROR: running kvpersist: {error}. Check files, permissions and disk.", file=sys.stderr)
        code = EXIT_ERROR
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    common = _common_options(os.environ.get("KVP_CONFIG_DIR", "/etc/kvpersist"))
    again = _common_options(argparse.SUPPRESS)  # an action keeps what stands before its name
    parser = argparse.ArgumentParser(prog="kvpersist", description="A KV cache for vLLM that survives restarts.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, parents=[common], help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    launch = add("launch", _launch, "Become the cache server or the engine (this is what the services run).")
    launch.add_argument("program", choices=("cache", "engine"))
    launch.add_argument(
        "--variant", choices=("persist", "uva"), help="engine variant (default: ENGINE_VARIANT of tp4.env)"
    )
    add("model-name", _model_name, "Print the namespace, verified against the model and the settings.")
    identity = add("identity", _identity, "Print the identity of this deployment.")
    actions = identity.add_subparsers(metavar="ACTION")
    explain = actions.add_parser("explain", parents=[again], help="say what differs between two identities")
    explain.set_defaults(command=_explain)
    named_as = "current, running, a namespace of this host's history, or an identity file"
    explain.add_argument("old", metavar="A", help=f"{named_as}; what is stored under it is counted")
    explain.add_argument("new", metavar="B", help=named_as)
    history = actions.add_parser("history", parents=[again], help="list the identities that this host has had")
    history.set_defaults(command=_history)
    hashed = add("hash", _hash, "Hash the model's files, check them against their download, remember the digests.")
    hashed.add_argument("--distrust", action="store_true", help="read every byte again, whatever is remembered")
    add("preflight", _preflight, "Check whether this host can run the deployment.")
    add("gate", _gate, "Compare what runs with the identity: 0 verified, 4 mismatch, 5 inconclusive.")
    recover = add(
        "recover", _recover, "Restart acceptance test: 0 PASS, 1 FAIL, 5 INCONCLUSIVE. Restarts the services."
    )
    recover.add_argument("--scenario", action="append", choices=SCENARIOS, help="A or B; both when not given")
    recover.add_argument(
        "--prompt-tokens", type=int, default=Plan.prompt_tokens, help="approximate prompt length (default: %(default)s)"
    )
    recover.add_argument("--expected-answer", default="", help="text that a right answer contains")
    recover.add_argument(
        "--timeout", type=float, default=Plan.timeout_s, help="seconds to wait for a service (default: %(default)s)"
    )
    recover.add_argument("--last", action="store_true", help="print the last result instead")
    config = add("config", _config, "Print the settings in effect.")
    config.add_argument("--write-docs", metavar="FOLDER", help="write the reference tables there instead")
    return parser


def _common_options(config_dir: str) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--config-dir",
        default=config_dir,
        help="folder of the rendered environment files (default: $KVP_CONFIG_DIR, else /etc/kvpersist)",
    )
    given = argparse.SUPPRESS if config_dir == argparse.SUPPRESS else False
    common.add_argument(
        "--json", action="store_true", default=given, help="print JSON with the keys of the Ansible modules"
    )
    common.add_argument("--debug", action="store_true", default=given, help="print the traceback of an error too")
    return common


def _launch(arguments: argparse.Namespace) -> int:
    environment = dict(os.environ)
    if arguments.variant:
        environment["ENGINE_VARIANT"] = arguments.variant
    deployment = load_deployment(arguments.config_dir, environment)
    if arguments.program == "cache":
        launch_cache(deployment, environment)
    launch_engine(deployment, environment)


def _model_name(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    with hashing_progress(_ERR) as progress:
        identity = verified_identity(deployment, progress)
    namespace = namespace_of(deployment, identity)
    _print(arguments, {"namespace": namespace}, lambda: print(namespace))
    return EXIT_OK


def _identity(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    identity = load_identity(deployment.config_dir)
    namespace = namespace_of(deployment, identity)
    path = served_path(deployment.engine, namespace)
    sources = load_sources(deployment.config_dir)
    content = {"namespace": namespace, "model_path": path, "identity": identity.as_dict(), "sources": sources}
    rows = [("namespace", namespace, ""), ("model_path", path, "")]
    rows += [
        (name, str(value), SOURCES.get(sources.get(name, ""), "not recorded"))
        for name, value in identity.as_dict().items()
    ]
    _print(arguments, content, lambda: _table(rows))
    return EXIT_OK


def _hash(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    cache = HashCache(f"{deployment.state_dir}/{HASH_CACHE}", trust=not arguments.distrust, keep=True)
    with hashing_progress(_ERR) as progress:
        digests = hash_model(deployment.engine.model_dir, cache, progress)
    _print(arguments, digests, lambda: _table(list(digests.items())))
    return EXIT_OK


def _explain(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    old, new = named(deployment, arguments.old), named(deployment, arguments.new)
    explanation = explained(deployment, old, new)
    _print(arguments, explanation.as_dict(), lambda: [print(line) for line in explanation.lines()])
    return EXIT_OK


def _history(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    known, damaged = entries(deployment.state_dir)
    for path in damaged:
        print(f"WARNING: {path} holds no identity of this host. Remove it.", file=sys.stderr)
    current = load_identity(deployment.config_dir).namespace()
    rows = [("namespace", "deployed", "model", "on disk", "")]
    content = []
    for entry in known:
        stored = stored_under(deployment.cache.root, entry.model_path)
        size = f"{stored.bytes / 1e9:.3f} GB in {stored.objects} objects" if stored else "could not be counted"
        mark = "current" if entry.namespace == current else ""
        rows.append((entry.namespace, entry.deployed[:19] + "Z", str(entry.identity.get("model_id")), size, mark))
        content.append({**asdict(entry), "current": bool(mark), "stored": asdict(stored) if stored else None})
    _print(arguments, {"identities": content, "damaged": damaged}, lambda: _table(rows))
    return EXIT_OK


def _preflight(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    problems = preflight_problems(deployment, service_manager(deployment))
    warnings = preflight_warnings(deployment)
    lines = [*(f"ERROR: {line}" for line in problems), *(f"WARNING: {line}" for line in warnings)]
    manager = resolved_manager(deployment.service_manager)
    _print(
        arguments,
        {"problems": problems, "warnings": warnings, "service_manager": manager},
        lambda: print("\n".join(lines if problems else [*lines, "This host is ready."])),
    )
    return EXIT_PREFLIGHT if problems else EXIT_OK


def _gate(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    verdict = run_gate(deployment, load_identity(deployment.config_dir))
    content = {"exit_code": verdict.exit_code, **verdict.as_dict()}
    _print(arguments, content, lambda: [print(line) for line in verdict.lines()])
    return verdict.exit_code


def _recover(arguments: argparse.Namespace) -> int:
    deployment = _deployment(arguments)
    if arguments.last:
        result = last_result(deployment.state_dir)
    else:
        plan = Plan(
            scenarios=tuple(arguments.scenario or SCENARIOS),
            prompt_tokens=arguments.prompt_tokens,
            expected_answer=arguments.expected_answer,
            timeout_s=arguments.timeout,
        )
        result = run_recovery(deployment, service_manager(deployment), plan, lambda line: _ERR.print(f"  {line}"))
    code = exit_code(result["verdict"])
    summary = [list(row) for row in summary_rows(result)] if "cold" in result else []
    _print(arguments, {**result, "exit_code": code, "summary": summary}, lambda: _recovery_table(result))
    return code


def _config(arguments: argparse.Namespace) -> int:
    if arguments.write_docs:
        for path in write_docs(arguments.write_docs):
            print(path)
        return EXIT_OK
    values = load_values(arguments.config_dir, os.environ)
    _print(arguments, values, lambda: _table([(name, to_text(value)) for name, value in values.items()]))
    return EXIT_OK


def _deployment(arguments: argparse.Namespace) -> Deployment:
    return load_deployment(arguments.config_dir, os.environ)


def _recovery_table(result: Mapping[str, Any]) -> None:
    if "cold" in result:
        _table(summary_rows(result))
        for outcome in result["outcomes"]:
            for text in (*outcome["failures"], *outcome["missing"]):
                print(f"{outcome['scenario']}: {text}")
    else:
        print(f"{result['verdict']}: {result.get('error', 'the run was interrupted')}")
    print(f"Evidence: {result['folder']}")


def _table(rows: Sequence[Sequence[Any]]) -> None:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    for _ in rows[0][1:]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    _OUT.print(table)


def _print(arguments: argparse.Namespace, content: Any, human: Callable[[], Any]) -> None:
    if arguments.json:
        print(json.dumps(content, ensure_ascii=False, indent=2))
    else:
        human()
