"""The identity gate: does what runs match what the identity says? Pure comparison; ``host.gate`` does the reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import EXIT_INCONCLUSIVE, EXIT_MISMATCH, EXIT_OK
from .identity import FIELDS, Identity

VERIFIED, MISMATCH, INCONCLUSIVE = "verified", "mismatch", "inconclusive"


@dataclass(frozen=True)
class Unreadable:
    """A fact that could not be read: why, and what to do about it."""

    cause: str
    fix: str


@dataclass(frozen=True)
class Difference:
    """One fact with two values: what the identity says and what runs."""

    name: str
    identity: Any
    running: Any


@dataclass(frozen=True)
class Verdict:
    """Outcome of the gate.

    Attributes:
        verdict: ``verified``, ``mismatch`` or ``inconclusive``.
        differences: facts with two values; any makes the verdict a mismatch.
        unreadable: facts that could not be read, by name; any makes the verdict inconclusive unless it is a mismatch.
        checked: names of the facts that were compared and agree.
    """

    verdict: str
    differences: tuple[Difference, ...]
    unreadable: Mapping[str, Unreadable]
    checked: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0, 4 or 5."""
        return {VERIFIED: EXIT_OK, MISMATCH: EXIT_MISMATCH, INCONCLUSIVE: EXIT_INCONCLUSIVE}[self.verdict]

    def lines(self) -> list[str]:
        """What a person reads: one line per difference or unreadable fact, then the consequence."""
        lines = [f"MISMATCH {d.name}: identity {d.identity!r}, running {d.running!r}" for d in self.differences]
        lines += [f"INCONCLUSIVE {name}: {why.cause}. {why.fix}" for name, why in self.unreadable.items()]
        if self.verdict == MISMATCH:
            lines.append(
                "The cache must not be reused by this engine. Run the playbook again to make both sides agree."
            )
        elif self.verdict == VERIFIED:
            lines.append(f"Verified: {len(self.checked)} facts agree.")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The keys that the module returns and ``--json`` prints."""
        return {
            "verdict": self.verdict,
            "differences": [{"name": d.name, "identity": d.identity, "running": d.running} for d in self.differences],
            "unreadable": {name: {"cause": why.cause, "fix": why.fix} for name, why in self.unreadable.items()},
            "checked": list(self.checked),
        }


def compare(identity: Identity, observed: Mapping[str, Any], links: Mapping[str, tuple[Any, Any]]) -> Verdict:
    """Compares an identity with what was observed.

    Args:
        identity: what identity.env.local says.
        observed: for every identity field its running value, or :class:`Unreadable`. A field that is missing here was
            not looked at, which is a defect of the caller and counts as unreadable.
        links: facts beyond the fields, as name to (expected, found): the model path, the cache port, registrations.
            ``found`` may be :class:`Unreadable`.
    """
    not_read = Unreadable("it was not read", "Report this as a defect of kvpersist")
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(identity, name), observed.get(name, not_read)) for name in FIELDS
    }
    pairs.update(links)
    differences = []
    unreadable = {}
    checked = []
    for name, (expected, found) in pairs.items():
        if isinstance(found, Unreadable):
            unreadable[name] = found
        elif found != expected:
            differences.append(Difference(name, expected, found))
        else:
            checked.append(name)
    verdict = MISMATCH if differences else INCONCLUSIVE if unreadable else VERIFIED
    return Verdict(verdict, tuple(differences), unreadable, tuple(checked))
