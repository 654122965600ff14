"""Environment files mean the same to our parser, to our renderer and to bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kvpersist.core.envfile import Entry, overlay, parse, quote, render
from kvpersist.core.errors import EXIT_USAGE, UsageError

NAMES = st.from_regex(r"KV_[A-Za-z0-9_]{0,12}", fullmatch=True)  # a prefix that no shell gives a meaning to
ANY_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
# Every value that a file can hold: all of Unicode but lone surrogates, which no file holds, and control characters.
VALUES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=[chr(c) for c in range(32) if c != 9]))
# What a hand-written value may be made of; each sign but the letters has a meaning to some shell.
SIGNS = "ab1'\"\\#=$`;&|<>()*?[]{}~! \t-:,@%+^./ü"


def bash_reads(folder: Path, text: str) -> dict[str, str]:
    """What a shell exports after it has read a file."""
    file = folder / "file.env"
    file.write_bytes(text.encode())
    run = subprocess.run(
        ["/usr/bin/env", "-i", "bash", "-c", 'set -ea; . "$1"; exec /usr/bin/env -0', "bash", str(file)],
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert run.stderr == b""
    return dict(pair.split("=", 1) for pair in run.stdout.decode().split("\0") if pair)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("export A=1", "1"),
        ("export\tA=1", "1"),
        ("  A=1  ", "1"),
        ("\tA=1\t", "1"),
        ("A=", ""),
        ("A= ", ""),
        ("A=''", ""),
        ('A=""', ""),
        ("A=a=b", "a=b"),
        ("A==", "="),
        ("A='a b'", "a b"),
        ('A="a b"', "a b"),
        ("A='a # b'", "a # b"),
        ("A=a#b", "a#b"),
        ("A=#b", "#b"),
        ("A=a # b", "a"),
        ("A=a\t# b", "a"),
        ("A= # b", ""),
        ("A='a' # it's", "a"),
        ("A='a'\"b\"c", "abc"),
        ("A='it'\\''s'", "it's"),
        ('A="it\'s"', "it's"),
        ("A='$HOME `x`'", "$HOME `x`"),
        ('A="\\$HOME"', "$HOME"),
        ('A="\\"\\\\\\`"', '"\\`'),
        ('A="\\n"', "\\n"),
        ("A=a\\ b", "a b"),
        ("A=\\$HOME", "$HOME"),
        ("A='\\'", "\\"),
        ("A=-1.5e-3", "-1.5e-3"),
        ("A=/a/b:c,d@e%f+g^h", "/a/b:c,d@e%f+g^h"),
        ("A=ключ", "ключ"),
        ("A='a\tb'", "a\tb"),
    ],
)
def test_a_line_is_read_as_bash_reads_it(tmp_path: Path, line: str, value: str) -> None:
    assert parse(line, "f") == {"A": value}
    assert bash_reads(tmp_path, line + "\n")["A"] == value


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("A", "no '='"),
        ("export", "no '='"),
        ("export A", "no '='"),
        ("A =1", "white space before '='"),
        ("A= 1", "white space after '='"),
        ("A=a b", "the value of A has a space"),
        ("A='a' b", "the value of A has a space"),
        ("A='a'# b", "the value of A has a space"),
        ("A='a", "the single quote in A is not closed"),
        ("A='it's'", "the single quote in A is not closed"),
        ('A="a', "the double quote in A is not closed"),
        ('A="a\\"', "the double quote in A is not closed"),
        ("A=a\\", "the value of A ends in a backslash"),
        ("A=$HOME", "'$' in the value of A has a meaning to a shell"),
        ('A="$HOME"', "'$' in the value of A has a meaning to a shell"),
        ('A="`id`"', "'`' in the value of A has a meaning to a shell"),
        ("A=`id`", "'`' in the value of A has a meaning to a shell"),
        ("A=a;b", "';' in the value of A has a meaning to a shell"),
        ("A=~/x", "'~' in the value of A has a meaning to a shell"),
        ("A=*.py", "'*' in the value of A has a meaning to a shell"),
        ("A=a&", "'&' in the value of A has a meaning to a shell"),
        ("A=(a)", "'(' in the value of A has a meaning to a shell"),
        ("1A=1", "'1A' is not a variable name"),
        ("A-B=1", "'A-B' is not a variable name"),
        ("A.B=1", "'A.B' is not a variable name"),
        ("=1", "'' is not a variable name"),
        ("Ä=1", "'Ä' is not a variable name"),
        ("A+=1", "'A+' is not a variable name"),
        ("export A B=1", "'A B' is not a variable name"),
        ("export -n A=1", "'-n A' is not a variable name"),
        ("A=a\rB=1", "control character"),
        ("A='a\0b'", "control character"),
        ('A="a\x1bb"', "control character"),
    ],
)
def test_a_wrong_line_is_refused_with_file_and_line(line: str, cause: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(f"# a comment\n\n{line}\nB=2\n", "/etc/kvpersist/tp4.env")
    assert str(caught.value).startswith("reading /etc/kvpersist/tp4.env line 3: ")
    assert cause in caught.value.cause
    assert caught.value.fix.endswith(".")
    assert caught.value.exit_code == EXIT_USAGE


def test_a_name_set_twice_is_refused_with_both_lines() -> None:
    with pytest.raises(UsageError, match=r"reading f line 4: A is already set in line 2\. Keep one of the two lines\."):
        parse("# x\nA=1\nB=2\nexport A=1\n", "f")


def test_comments_blank_lines_and_crlf_are_skipped_and_order_is_kept() -> None:
    text = "# c\r\n\r\n   # d\r\nB='x y'\r\nexport A=1 # e\r\n\r\n"
    assert list(parse(text, "f").items()) == [("B", "x y"), ("A", "1")]


@pytest.mark.parametrize("text", ["", "\n", "\r\n", "# nothing", "   \n\t\n"])
def test_a_file_without_assignments_is_empty(text: str) -> None:
    assert parse(text, "f") == {}


@given(st.dictionaries(ANY_NAMES, VALUES))
def test_what_is_rendered_is_parsed_to_the_same_values_in_the_same_order(values: dict[str, str]) -> None:
    text = render([Entry(name, value, ("what it means",)) for name, value in values.items()], ("a header",))
    assert list(parse(text, "f").items()) == list(values.items())


@given(st.dictionaries(NAMES, VALUES, min_size=1))
@hypothesis_settings(max_examples=60)
def test_bash_reads_rendered_files_as_we_do(tmp_path_factory: pytest.TempPathFactory, values: dict[str, str]) -> None:
    text = render([Entry(name, value, ("what it's $worth",)) for name, value in values.items()])
    seen = bash_reads(tmp_path_factory.mktemp("env"), text)
    assert {name: seen.get(name) for name in values} == values


def accepted(line: str) -> dict[str, str]:
    try:
        return parse(line, "f")
    except UsageError:
        return {}


@given(st.lists(st.text(SIGNS, max_size=10), min_size=5, max_size=40))
@hypothesis_settings(max_examples=60)
def test_bash_agrees_with_every_hand_written_line_that_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, tails: list[str]
) -> None:
    lines = {f"KV_{number}={tail}": accepted(f"KV_{number}={tail}") for number, tail in enumerate(tails)}
    expected = {name: value for parsed in lines.values() for name, value in parsed.items()}
    seen = bash_reads(
        tmp_path_factory.mktemp("env"), "\n".join(line for line, parsed in lines.items() if parsed) + "\n"
    )
    assert {name: seen.get(name) for name in expected} == expected


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\0", "\x1b[1m"])
def test_a_value_that_no_line_can_hold_is_not_rendered(value: str) -> None:
    with pytest.raises(UsageError, match="rendering KV_PORT: the value has a line break or a control character"):
        quote("KV_PORT", value)


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A\nB", "ä"])
def test_a_bad_name_is_not_rendered(name: str) -> None:
    with pytest.raises(UsageError, match="is not a variable name"):
        render([Entry(name, "1")])


def test_a_name_is_rendered_once() -> None:
    with pytest.raises(UsageError, match="A stands in it twice"):
        render([Entry("A", "1"), Entry("A", "1")])


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_no_comment_becomes_an_assignment(text: str) -> None:
    try:
        rendered = render([Entry("A", "1", (text,))], (text,))
    except UsageError:
        return
    assert parse(rendered, "f") == {"A": "1"}


def test_plain_values_stay_readable() -> None:
    text = render([Entry("PORT", "5555"), Entry("NAME", "a b", ("Its name.",))], ("Written by kvpersist.",))
    assert text == "# Written by kvpersist.\nPORT=5555\n\n# Its name.\nNAME='a b'\n"


def test_what_the_environment_exports_wins_over_the_file() -> None:
    assert overlay({"A": "1", "B": "2"}, {"B": "3", "C": "4"}) == {"A": "1", "B": "3"}
