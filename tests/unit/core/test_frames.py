from __future__ import annotations

import io
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core import frames
from kvpersist.core.frames import Damage, FrameError, FrameKey, Header

KEYS = st.builds(
    FrameKey,
    scope=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
    kv_rank=st.integers(0, 2**64 - 1),
    object_group=st.integers(0, 2**32 - 1),
    chunk_hash=st.binary(min_size=1, max_size=64),
    cache_salt=st.text(st.characters(exclude_categories=["Cs"]), max_size=128),
)
PAYLOADS = st.binary(min_size=1, max_size=9000)
KEY = FrameKey("kvp-" + "0" * 32, 0x01000100, 0, bytes(range(32)), "")


def frame(key: FrameKey, payload: bytes, codec: int = frames.CODEC_NONE, raw_length: int | None = None) -> bytes:
    page = bytearray(frames.PAGE)
    header = Header(key, codec, 2, len(payload) if raw_length is None else raw_length, len(payload), 0xABCD)
    frames.pack_header(page, header)
    padded = payload.ljust(frames.whole_pages(len(payload)), b"\0")
    frames.seal(page, zlib.crc32(page, zlib.crc32(padded)))
    return bytes(page) + padded


def verify(data: bytes, key: FrameKey | None = None) -> Header:
    return frames.verify(io.BytesIO(data), len(data), key=key)


@given(KEYS, PAYLOADS)
def test_a_written_frame_reads_back(key: FrameKey, payload: bytes) -> None:
    data = frame(key, payload)
    header = verify(data, key)
    assert (header.key, header.raw_length, header.element_size, header.dtype_code) == (key, len(payload), 2, 0xABCD)
    assert len(data) == frames.file_length(len(payload))
    assert data[frames.PAGE : frames.PAGE + header.stored_length] == payload


@given(st.data(), PAYLOADS)
def test_any_flipped_bit_is_found(data: st.DataObject, payload: bytes) -> None:
    damaged = bytearray(frame(KEY, payload))
    position = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[position // 8] ^= 1 << position % 8
    with pytest.raises(FrameError):
        verify(bytes(damaged), KEY)


@pytest.mark.parametrize("byte", range(80))
@pytest.mark.parametrize("bit", [0, 7])
def test_any_flipped_bit_of_the_header_fields_is_found(byte: int, bit: int) -> None:
    damaged = bytearray(frame(KEY, b"x" * 5000))
    damaged[byte] ^= 1 << bit
    with pytest.raises(FrameError):
        verify(bytes(damaged))


@given(st.data(), PAYLOADS)
def test_any_cut_is_found(data: st.DataObject, payload: bytes) -> None:
    whole = frame(KEY, payload)
    with pytest.raises(FrameError) as caught:
        verify(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert caught.value.damage is Damage.TRUNCATED


@given(PAYLOADS, st.integers(1, 9000))
def test_any_longer_file_is_found(payload: bytes, more: int) -> None:
    with pytest.raises(FrameError) as caught:
        verify(frame(KEY, payload) + bytes(more))
    assert caught.value.damage is Damage.LENGTH


@given(KEYS, KEYS)
def test_a_frame_of_another_key_is_found(mine: FrameKey, other: FrameKey) -> None:
    data = frame(mine, b"payload")
    if mine == other:
        verify(data, other)
        return
    with pytest.raises(FrameError) as caught:
        verify(data, other)
    assert caught.value.damage is Damage.KEY


def patched(data: bytes, offset: int, value: bytes) -> bytes:
    """The frame with other header bytes and a checksum that fits them."""
    page = bytearray(data[: frames.PAGE])
    page[offset : offset + len(value)] = value
    frames.seal(page, 0)
    frames.seal(page, zlib.crc32(page, zlib.crc32(data[frames.PAGE :])))
    return bytes(page) + data[frames.PAGE :]


@pytest.mark.parametrize(
    ("offset", "value", "damage"),
    [
        (0, b"KVL2", Damage.MAGIC),
        (4, b"\2", Damage.VERSION),
        (5, b"\7", Damage.HEADER),
        (6, b"\1", Damage.HEADER),
        (8, b"\1", Damage.LENGTH),
        (40, b"\0", Damage.HEADER),
        (42, b"\xff\xff", Damage.HEADER),
        (52 + 32, b"\xff", Damage.HEADER),
    ],
)
def test_a_header_that_cannot_be_is_named(offset: int, value: bytes, damage: Damage) -> None:
    with pytest.raises(FrameError) as caught:
        verify(patched(frame(KEY, b"payload"), offset, value))
    assert caught.value.damage is damage


def test_a_file_that_shrinks_while_it_is_read_is_truncated() -> None:
    data = frame(KEY, bytes(10_000))
    with pytest.raises(FrameError) as caught:
        frames.verify(io.BytesIO(data[:-100]), len(data))
    assert caught.value.damage is Damage.TRUNCATED


@pytest.mark.parametrize(
    "key",
    [
        KEY._replace(chunk_hash=b""),
        KEY._replace(chunk_hash=bytes(65)),
        KEY._replace(scope=""),
        KEY._replace(scope="m" * 2049),
        KEY._replace(cache_salt="é" * 257),
        KEY._replace(kv_rank=-1),
        KEY._replace(object_group=1 << 32),
    ],
)
def test_a_key_beyond_the_limits_is_refused(key: FrameKey) -> None:
    with pytest.raises(ValueError, match=r"has|range"):
        frames.check_key(key)


def test_dtypes_of_one_size_are_told_apart() -> None:
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    names += " float4_e2m1fn_x2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
    codes = [frames.dtype_code([name]) for name in names.split()]
    assert len({*codes, frames.dtype_code(["bfloat16", "uint8"]), frames.dtype_code(["uint8", "bfloat16"])}) == 21


def test_the_largest_key_fits() -> None:
    key = FrameKey("m" * 2048, 2**64 - 1, 2**32 - 1, bytes(64), "s" * 512)
    assert verify(frame(key, b"payload")).key == key


def test_verify_reports_what_it_read() -> None:
    seen: list[int] = []
    data = frame(KEY, bytes(3_000_000))
    frames.verify(io.BytesIO(data), len(data), on_bytes=seen.append)
    assert sum(seen) == len(data) - frames.PAGE
