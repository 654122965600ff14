from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpersist.core import frames
from kvpersist.core.errors import UsageError
from kvpersist.core.frames import FrameError
from kvpersist_l2 import codecs

for package in ("numpy", "zstandard", "lz4"):
    pytest.importorskip(package)

CODECS = {number: codecs.make_codec(number) for number in (frames.CODEC_ZSTD, frames.CODEC_LZ4)}


def stored(codec: codecs.Codec, data: bytes, element_size: int) -> bytes:
    return b"".join(bytes(blob) for blob in codec.encode_piece(memoryview(data), element_size))


def decoded(codec: codecs.Codec, data: bytes, length: int, element_size: int) -> tuple[bytes, int]:
    out = bytearray(length)
    used = codec.decode_piece(memoryview(data), memoryview(out), element_size)
    return bytes(out), used


def floats(count: int) -> bytes:
    """bfloat16 values as KV has them: few exponents, random mantissas."""
    chance = random.Random(1)
    packed = struct.pack(f"<{count}f", *(chance.gauss(0, 1) for _ in range(count)))
    return b"".join(packed[at + 2 : at + 4] for at in range(0, len(packed), 4))


@pytest.mark.parametrize("number", CODECS)
@given(st.data(), st.sampled_from([1, 2, 3, 4, 8]))
def test_pieces_read_back(number: int, data: st.DataObject, element_size: int) -> None:
    raw = data.draw(st.one_of(st.binary(min_size=1, max_size=3000), st.integers(1, 70_000).map(bytes)))
    blob = stored(CODECS[number], raw, element_size)
    assert decoded(CODECS[number], blob + b"next piece", len(raw), element_size) == (raw, len(blob))
    assert len(blob) <= codecs.worst_stored_length(len(raw))


@pytest.mark.parametrize("number", CODECS)
@pytest.mark.parametrize("size", [1, 2, 3, codecs.PIECE - 1, codecs.PIECE])
@pytest.mark.parametrize("element_size", [1, 2, 4, 8])
def test_incompressible_pieces_are_stored_as_they_are(number: int, size: int, element_size: int) -> None:
    raw = random.Random(size).randbytes(size)
    blob = stored(CODECS[number], raw, element_size)
    assert len(blob) <= codecs.MAX_STORED_PIECE - codecs.PIECE + size
    assert decoded(CODECS[number], blob, size, element_size) == (raw, len(blob))


def test_planes_make_the_difference_on_16_bit_floats() -> None:
    raw = floats(codecs.PIECE // 2)
    zstd = CODECS[frames.CODEC_ZSTD]
    assert len(raw) / len(stored(zstd, raw, 2)) > 1.40
    assert len(raw) / len(stored(zstd, raw, 1)) < 1.35


@pytest.mark.parametrize("number", CODECS)
@given(st.data())
def test_damaged_pieces_never_crash(number: int, data: st.DataObject) -> None:
    raw = bytes(2000) + random.Random(2).randbytes(2000)
    blob = bytearray(stored(CODECS[number], raw, 2))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, min(40, len(blob) - 1)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(blob)))
    with contextlib.suppress(FrameError):
        decoded(CODECS[number], bytes(blob[:cut]), len(raw), 2)


def test_a_codec_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(UsageError, match="zstandard is not installed"):
        codecs.chosen_codec("zstd")
    with pytest.raises(codecs.CodecUnavailableError, match="zstd"):
        codecs.make_codec(frames.CODEC_ZSTD)
    assert codecs.chosen_codec("none") is None
