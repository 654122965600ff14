"""Damaged files under a running LMCache server, asked for through LMCache's own client, as an engine does.

The client checks every byte that it is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Client, Server, plugin, until
from .test_damage import DAMAGE, swap

PROMPTS = len(DAMAGE) + 3


@pytest.fixture(scope="module", params=["none", "zstd"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("damage")
    running = Server(folder / "server.log", plugin(folder / "cache", codec=request.param))
    running.wait()
    yield running
    running.kill()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    connected = Client(server, PROMPTS)
    yield connected
    connected.close()


def objects(server: Server) -> set[Path]:
    return set(Path(server.status()["root"]).glob("kvp-*/??/*.bin"))


def stored(server: Server, client: Client, prompt: int) -> list[Path]:
    """Stores a prompt and leaves it on disk only.

    Returns:
        The files of its chunks, in their order.
    """
    before = objects(server)
    assert client.ask(prompt) == 0
    until(lambda: len(objects(server)) == len(before) + Client.CHUNKS)
    server.forget()
    return sorted(objects(server) - before, key=lambda path: -path.stat().st_mtime_ns)


def damaged(server: Server) -> dict[str, int]:
    return {name: count for name, count in server.status()["counters"].items() if name.startswith("damaged")}


def expect_healed(server: Server, client: Client, prompt: int) -> None:
    server.forget()
    assert client.ask(prompt) == Client.CHUNKS
    assert server.status()["is_healthy"]


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_miss_counted_and_healed_by_the_next_store(server: Server, client: Client, name: str) -> None:
    kind, damage = DAMAGE[name]
    prompt = list(DAMAGE).index(name)
    _, second = stored(server, client, prompt)
    counted, quarantined = damaged(server), server.status()["quarantine"]["files"]
    damage(second)
    assert client.ask(prompt) == 1
    assert damaged(server) == {**counted, f"damaged_{kind}": counted.get(f"damaged_{kind}", 0) + 1}
    assert server.status()["quarantine"]["files"] == quarantined + 1
    expect_healed(server, client, prompt)


def test_files_renamed_to_each_others_key_are_misses(server: Server, client: Client) -> None:
    prompts = (len(DAMAGE), len(DAMAGE) + 1)
    (one, _), (other, _) = (stored(server, client, prompt) for prompt in prompts)
    counted = damaged(server).get("damaged_key", 0)
    swap(one, other)
    assert [client.ask(prompt) for prompt in prompts] == [0, 0]
    assert damaged(server)["damaged_key"] == counted + 2
    for prompt in prompts:
        expect_healed(server, client, prompt)


def test_kv_of_another_dtype_under_the_same_keys_is_a_miss(server: Server, client: Client) -> None:
    prompt = PROMPTS - 1
    stored(server, client, prompt)
    client.close()
    for dtype, kind in (("float32", "length"), ("uint8", "length"), ("int8", "dtype"), ("bfloat16", "length")):
        counted = damaged(server).get(f"damaged_{kind}", 0)
        other = Client(server, PROMPTS, dtype)
        assert other.ask(prompt) == 0, dtype
        # The first chunk ends the prefix, but both were read.
        assert damaged(server)[f"damaged_{kind}"] == counted + Client.CHUNKS
        expect_healed(server, other, prompt)
        server.forget()
        other.close()
