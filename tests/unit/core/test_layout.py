from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core import layout
from kvpersist.core.frames import FrameKey

NAMESPACE = "kvp-" + "0123456789abcdef" * 2
KEYS = st.builds(
    FrameKey,
    scope=st.sampled_from([NAMESPACE, "meta-llama/Llama-3.1-8B", "a" * 2000, "../../etc", "モデル"]),
    kv_rank=st.integers(0, 2**64 - 1),
    object_group=st.integers(0, 2**32 - 1),
    chunk_hash=st.binary(min_size=1, max_size=64),
    cache_salt=st.text(st.characters(exclude_categories=["Cs"]), max_size=128),
)


@given(KEYS)
def test_names_read_back_and_stay_inside_their_folder(key: FrameKey) -> None:
    path = layout.object_path(key)
    folder, shard, name = path.split("/")
    assert layout.is_object_folder(folder)
    assert layout.is_shard(shard)
    assert len(layout.temporary_path(name, "0" * 32)) < 255
    parsed = layout.parse_object_name(name)
    assert parsed is not None
    assert parsed == (key.kv_rank, key.object_group, key.chunk_hash, layout.salt_digest(key.cache_salt))


@given(KEYS, KEYS)
def test_two_keys_never_share_a_path(one: FrameKey, other: FrameKey) -> None:
    assert (layout.object_path(one) == layout.object_path(other)) == (one == other)


@pytest.mark.parametrize("prefix", ["", "/models/mimo-pro/", "/host/other/path/"])
def test_the_path_before_a_namespace_does_not_matter(prefix: str) -> None:
    assert layout.scope(prefix + NAMESPACE) == NAMESPACE
    assert layout.scope(prefix + NAMESPACE + "/") == NAMESPACE
    assert layout.folder(NAMESPACE) == NAMESPACE


@pytest.mark.parametrize("name", ["gpt2", f"{NAMESPACE}/gpt2", f"{NAMESPACE}0", f"x{NAMESPACE}", NAMESPACE.upper()])
def test_other_model_names_keep_their_whole_name(name: str) -> None:
    assert layout.scope(name) == name
    assert layout.folder(name).startswith("x-")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "00000001-0-00.bin.tmp." + "0" * 32,
        "00000001-0-0.bin",
        "0000001-0-00.bin",
        "000000001-0-00.bin",
        "00000001-00-00.bin",
        "00000001-0-0G.bin",
        "00000001-0-AA.bin",
        "00000001-0-00.bin\n",
        "00000001-0-00-1234.bin",
        ".model.json",
    ],
)
def test_other_files_are_no_objects(name: str) -> None:
    assert layout.parse_object_name(name) is None


def test_temporary_names_tell_their_writer() -> None:
    name = layout.temporary_path("00000001-0-00.bin", "a" * 32)
    assert layout.parse_temporary_name(name) == "a" * 32
    assert layout.parse_temporary_name("00000001-0-00.bin") is None
    assert layout.parse_temporary_name("00000001-0-00.bin.tmp.zz") is None


def test_model_files_are_believed_only_where_they_belong() -> None:
    text = layout.render_model_file(f"/models/{NAMESPACE}")
    assert layout.parse_model_file(text, NAMESPACE) == f"/models/{NAMESPACE}"
    assert layout.parse_model_file(text, layout.folder("gpt2")) is None
    for broken in ("", "{", "[]", '{"model_name": 3}'):
        assert layout.parse_model_file(broken, NAMESPACE) is None
