"""Makes the kit of the host tests importable and its fixtures known here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))

from kvp_kit import deployed, spawn

__all__ = ["deployed", "spawn"]
