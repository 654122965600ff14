from __future__ import annotations

import importlib.util
import os

# These tests run with the engine's packages; elsewhere there is nothing to compare with.
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR")
