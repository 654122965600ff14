"""Errors that a person can act on, and the exit codes that scripts can rely on."""

from __future__ import annotations

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_MISMATCH = 4
EXIT_INCONCLUSIVE = 5


class KvpError(Exception):
    """Something went wrong that the reader can fix.

    Args:
        doing: what was being done, without a full stop, e.g. ``reading /etc/kvpersist/tp4.env``.
        cause: what stopped it, without a full stop.
        fix: what to do now, as a sentence.
    """

    exit_code = EXIT_ERROR

    def __init__(self, doing: str, cause: str, fix: str) -> None:
        self.doing = doing
        self.cause = cause
        self.fix = fix
        super().__init__(f"{doing}: {cause}. {fix}")


class UsageError(KvpError):
    """The input is wrong: a value, a file, an argument."""

    exit_code = EXIT_USAGE


class PreflightError(KvpError):
    """This host cannot run what was asked for."""

    exit_code = EXIT_PREFLIGHT


class MismatchError(KvpError):
    """What runs is not what the identity says; its cache must not be reused."""

    exit_code = EXIT_MISMATCH


class InconclusiveError(KvpError):
    """Something that must be known could not be read."""

    exit_code = EXIT_INCONCLUSIVE
