"""Environment files: one parser and one renderer for every file of a deployment.

The format is the part of POSIX shell that needs no shell: ``NAME=value``, optional ``export``, single and double
quotes, ``#`` comments. Nothing is expanded. Whatever a shell would read differently (``$``, a space around ``=``, a
second assignment of the same name) is an error with its line, so that a file means the same to this parser and to
``bash``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_BARE = re.compile(r"[A-Za-z0-9_./:,@%+=-]*\Z")
_ESCAPABLE_IN_DOUBLE_QUOTES = '"\\$`'
# A shell gives each of these a meaning when it stands outside quotes.
_SPECIAL_BARE = set("$`;&|<>()*?[]{}~!")


class Entry(NamedTuple):
    """One assignment to render: its name, its value and the comment lines above it."""

    name: str
    value: str
    comment: tuple[str, ...] = ()


def parse(text: str, source: str) -> dict[str, str]:
    """Parses an environment file.

    Args:
        text: the file's content; LF or CRLF line ends.
        source: the file's name, for error messages.

    Returns:
        Values by name, in the order of the file.

    Raises:
        UsageError: naming ``source`` and the line, for a bad name, an unterminated quote, an expansion, white space
            around ``=``, a control character or a name that is assigned twice.
    """
    values: dict[str, str] = {}
    seen: dict[str, int] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw[:-1] if raw.endswith("\r") else raw
        parsed = _parse_line(line, source, number)
        if parsed is None:
            continue
        name, value = parsed
        if name in values:
            raise _error(source, number, f"{name} is already set in line {seen[name]}", "Keep one of the two lines.")
        values[name] = value
        seen[name] = number
    return values


def render(entries: Iterable[Entry], header: Iterable[str] = ()) -> str:
    """Renders an environment file that ``parse`` and a shell read back to the same values.

    Args:
        entries: the assignments, in order.
        header: comment lines for the top of the file.

    Raises:
        UsageError: for a bad or repeated name, or a value or comment with a line break or control character.
    """
    lines = [_comment(line) for line in header]
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise UsageError("rendering an environment file", f"{entry.name} stands in it twice", "Remove one of them.")
        seen.add(entry.name)
        if entry.comment:
            lines.append("")
            lines.extend(_comment(line) for line in entry.comment)
        lines.append(f"{_checked_name(entry.name)}={quote(entry.name, entry.value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def quote(name: str, value: str) -> str:
    """Quotes a value where it needs it. ``name`` is for the error message."""
    if _has_control_character(value):
        raise UsageError(f"rendering {name}", "the value has a line break or a control character", "Remove it.")
    if _BARE.match(value):
        return value
    return "'" + value.replace("'", "'\\''") + "'"


def overlay(values: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Values of a file, with those that ``environment`` also sets replaced: what is exported wins over files."""
    return {name: environment.get(name, value) for name, value in values.items()}


def _comment(line: str) -> str:
    if _has_control_character(line):
        raise UsageError("rendering a comment", "it has a line break or a control character", "Remove it.")
    return f"# {line}".rstrip()


def _has_control_character(text: str) -> bool:
    return any(ord(character) < 32 and character != "\t" for character in text)


def _checked_name(name: str) -> str:
    if not _NAME.match(name):
        raise UsageError(
            "rendering an environment file",
            f"{name!r} is not a variable name",
            "Use letters, digits and underscores, not starting with a digit.",
        )
    return name


def _parse_line(line: str, source: str, number: int) -> tuple[str, str] | None:
    stripped = line.strip(" \t")
    if not stripped or stripped.startswith("#"):
        return None
    if _has_control_character(stripped):
        raise _error(source, number, "a control character", "Remove it.")
    if stripped.startswith(("export ", "export\t")):
        stripped = stripped[len("export") :].lstrip(" \t")
    name, separator, rest = stripped.partition("=")
    if not separator:
        raise _error(source, number, f"no '=' in {stripped[:40]!r}", "Write NAME=value, or start the line with '#'.")
    if name != name.rstrip(" \t"):
        raise _error(source, number, "white space before '='", "Write NAME=value without spaces around '='.")
    if not _NAME.match(name):
        raise _error(
            source,
            number,
            f"{name[:40]!r} is not a variable name",
            "Use letters, digits and underscores, not starting with a digit.",
        )
    if rest[:1] in (" ", "\t") and rest.strip(" \t") and not rest.strip(" \t").startswith("#"):
        raise _error(source, number, "white space after '='", "Write NAME=value without spaces around '='.")
    return name, _parse_value(rest, name, source, number)


def _parse_value(text: str, name: str, source: str, number: int) -> str:
    out: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        if character in " \t":
            rest = text[position:].strip(" \t")
            if rest and not rest.startswith("#"):
                raise _error(source, number, f"the value of {name} has a space", "Put the value in single quotes.")
            break
        if character == "'":
            end = text.find("'", position + 1)
            if end < 0:
                raise _error(source, number, f"the single quote in {name} is not closed", "Close it on the same line.")
            out.append(text[position + 1 : end])
            position = end + 1
        elif character == '"':
            piece, position = _parse_double_quoted(text, position + 1, name, source, number)
            out.append(piece)
        elif character == "\\":
            if position + 1 == len(text):
                raise _error(source, number, f"the value of {name} ends in a backslash", "Put it on one line, quoted.")
            out.append(text[position + 1])
            position += 2
        elif character in _SPECIAL_BARE:
            raise _error(
                source,
                number,
                f"{character!r} in the value of {name} has a meaning to a shell; nothing is expanded here",
                "Put the value in single quotes to take it literally.",
            )
        else:
            out.append(character)
            position += 1
    return "".join(out)


def _parse_double_quoted(text: str, position: int, name: str, source: str, number: int) -> tuple[str, int]:
    out: list[str] = []
    while position < len(text):
        character = text[position]
        if character == '"':
            return "".join(out), position + 1
        if character == "\\" and text[position + 1 : position + 2] in tuple(_ESCAPABLE_IN_DOUBLE_QUOTES):
            out.append(text[position + 1])
            position += 2
            continue
        if character in "$`":
            raise _error(
                source,
                number,
                f"{character!r} in the value of {name} has a meaning to a shell; nothing is expanded here",
                "Put the value in single quotes to take it literally.",
            )
        out.append(character)
        position += 1
    raise _error(source, number, f"the double quote in {name} is not closed", "Close it on the same line.")


def _error(source: str, number: int, cause: str, fix: str) -> UsageError:
    return UsageError(f"reading {source} line {number}", cause, fix)
