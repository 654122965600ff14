"""Makes the shared kit of this folder importable and its fixtures known."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kvp_kit import deployed, short_folder, spawn

__all__ = ["deployed", "short_folder", "spawn"]
