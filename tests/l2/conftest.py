from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .harness import Driver, Memory

# These tests run in LMCache's environment, with pytest beside it; elsewhere there is nothing to import.
if importlib.util.find_spec("lmcache") is None:
    collect_ignore_glob = ["*.py"]


@pytest.fixture(scope="session")
def memory() -> Iterator[Memory]:
    from .harness import MIB, Memory

    first_tier = Memory(256 * MIB)
    yield first_tier
    first_tier.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Makes adapters on one cache root; each closes the one before, as a restart does."""
    from kvpersist_l2.adapter import KvPersistL2Adapter

    from .harness import Driver

    adapters: list[KvPersistL2Adapter] = []

    def make_adapter(**params: Any) -> Driver:
        for adapter in adapters:
            adapter.close()
        values = {"root": str(tmp_path / "cache"), "capacity_bytes": 1 << 30, "min_free_bytes": 0, **params}
        adapter = KvPersistL2Adapter(values)
        adapter.set_backend_identity("plugin")
        adapters.append(adapter)
        return Driver(adapter)

    yield make_adapter
    for adapter in adapters:
        adapter.close()
