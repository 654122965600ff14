"""Lossless codecs. An object is compressed in independent pieces, so that compression and I/O overlap.

The elements of KV are 16-bit floats as a rule: their high bytes (sign and exponent) compress well, their low bytes do
not at all, and together they compress badly. Each piece is therefore split into one plane for each byte of an element.
docs/frame-format.md describes the pieces.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Callable

from kvpersist.core import frames
from kvpersist.core.errors import UsageError
from kvpersist.core.frames import Damage, FrameError

PIECE = 512 * 1024
_ELEMENT_SIZES = (2, 4, 8)
_HEAD = struct.Struct("<BBH")
_LENGTH = struct.Struct("<I")
# Longest piece as stored: every plane as it is.
MAX_STORED_PIECE = PIECE + _HEAD.size + 8 * _LENGTH.size
_SAMPLE = 16 * 1024
_SAMPLE_GAIN = 0.98

Blob = Any
Functions = tuple[Callable[[Any], bytes], Callable[[Any, int], bytes]]


class CodecUnavailableError(Exception):
    """The package of a codec is not installed."""


class Codec:
    """One codec; its objects for compression are kept by thread, since they are not thread-safe.

    Args:
        number: its number in a frame.
        make: gives the functions ``compress(data)`` and ``decompress(data, length)`` of one thread.
    """

    def __init__(self, number: int, make: Callable[[], Functions]) -> None:
        self.number = number
        self._make = make
        self._local = threading.local()
        make()

    def encode_piece(self, data: memoryview, element_size: int) -> list[Blob]:
        """Compresses one piece.

        Args:
            data: at most :data:`PIECE` bytes.
            element_size: bytes of one element.

        Returns:
            Buffers which, one after the other, are the stored piece.
        """
        planes = _split(data, element_size)
        blobs: list[Blob] = []
        mask = 0
        for number, plane in enumerate(planes):
            blob = self._shrink(plane, is_first=number == 0)
            if blob is not None:
                mask |= 1 << number
            blobs.append(plane if blob is None else blob)
        head = _HEAD.pack(len(planes), mask, 0) + b"".join(_LENGTH.pack(len(blob)) for blob in blobs)
        return [head, *blobs]

    def decode_piece(self, stored: memoryview, out: memoryview, element_size: int) -> int:
        """Decompresses the piece at the start of ``stored``.

        Args:
            stored: the rest of the payload, or the first :data:`MAX_STORED_PIECE` bytes of it.
            out: where exactly this piece belongs.
            element_size: bytes of one element.

        Returns:
            Stored bytes of the piece.

        Raises:
            FrameError: for bytes that no encoder wrote.
        """
        expected = _plane_count(len(out), element_size)
        head = _HEAD.size + expected * _LENGTH.size
        if len(stored) < head:
            raise FrameError(Damage.LENGTH, "a compressed piece is cut")
        planes, mask, reserved = _HEAD.unpack_from(stored, 0)
        if planes != expected or mask >> planes or reserved:
            raise FrameError(Damage.HEADER, f"a compressed piece has {planes} planes, mask {mask}")
        length = len(out) // planes
        position = head
        parts = []
        for number in range(planes):
            size = _LENGTH.unpack_from(stored, _HEAD.size + number * _LENGTH.size)[0]
            blob = stored[position : position + size]
            if len(blob) != size:
                raise FrameError(Damage.LENGTH, "a compressed piece is cut")
            parts.append(self._grow(blob, length) if mask >> number & 1 else blob)
            if len(parts[-1]) != length:
                raise FrameError(Damage.LENGTH, f"a plane has {len(parts[-1])} bytes instead of {length}")
            position += size
        _join(parts, out)
        return position

    def _functions(self) -> Functions:
        functions: Functions | None = getattr(self._local, "functions", None)
        if functions is None:
            functions = self._local.functions = self._make()
        return functions

    def _shrink(self, plane: Any, *, is_first: bool) -> bytes | None:
        compress = self._functions()[0]
        if not is_first and len(plane) > _SAMPLE:
            # Mantissas hardly ever compress: a sample tells at a sixteenth of the cost.
            middle = (len(plane) - _SAMPLE) // 2
            if len(compress(plane[middle : middle + _SAMPLE])) > _SAMPLE * _SAMPLE_GAIN:
                return None
        blob = compress(plane)
        return blob if len(blob) < len(plane) else None

    def _grow(self, blob: memoryview, length: int) -> bytes:
        try:
            return self._functions()[1](blob, length)
        except Exception as error:  # noqa: BLE001 - each library has its own, and damaged bytes are all it can mean
            raise FrameError(Damage.CHECKSUM, f"a compressed plane does not decompress ({error})") from None


def worst_stored_length(raw_length: int) -> int:
    """Most bytes that a compressed payload can have."""
    pieces = -(-raw_length // PIECE)
    return raw_length + pieces * (MAX_STORED_PIECE - PIECE)


def make_codec(number: int) -> Codec:
    """The codec with a number of :mod:`kvpersist.core.frames`, other than ``CODEC_NONE``.

    Raises:
        CodecUnavailableError: when its package is not installed.
    """
    try:
        return Codec(number, {frames.CODEC_ZSTD: _zstd, frames.CODEC_LZ4: _lz4}[number])
    except ImportError as error:
        raise CodecUnavailableError(f"codec {frames.CODEC_NAMES[number]}: {error}") from None


def chosen_codec(name: str) -> Codec | None:
    """The codec that new objects are written with, None for none.

    Raises:
        UsageError: when its package is not installed.
    """
    number = {known: number for number, known in frames.CODEC_NAMES.items()}[name]
    if number == frames.CODEC_NONE:
        return None
    try:
        return make_codec(number)
    except CodecUnavailableError:
        package = {"zstd": "zstandard", "lz4": "lz4"}[name]
        raise UsageError(
            f"preparing codec {name}", f"the package {package} is not installed", f"Install {package} beside lmcache."
        ) from None


def _zstd() -> Functions:
    import zstandard

    # Tuned to be little more than Huffman coding: KV has no repetitions to search for, only skewed bytes.
    params = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        window_log=17,
        chain_log=6,
        search_log=1,
        target_length=0,
    )
    compressor = zstandard.ZstdCompressor(compression_params=params)
    decompressor = zstandard.ZstdDecompressor()

    def grow(blob: Any, length: int) -> bytes:
        if zstandard.frame_content_size(blob) != length:  # before memory is reserved for what it claims
            raise FrameError(Damage.LENGTH, "a zstd frame is of another length than its plane")
        data: bytes = decompressor.decompress(blob, max_output_size=length)
        return data

    return compressor.compress, grow


def _lz4() -> Functions:
    import lz4.block

    def shrink(data: Any) -> bytes:
        blob: bytes = lz4.block.compress(data, mode="fast", store_size=False)
        return blob

    def grow(blob: Any, length: int) -> bytes:
        data: bytes = lz4.block.decompress(blob, uncompressed_size=length)
        return data

    return shrink, grow


def _plane_count(length: int, element_size: int) -> int:
    return element_size if element_size in _ELEMENT_SIZES and length % element_size == 0 else 1


def _split(data: memoryview, element_size: int) -> list[Any]:
    count = _plane_count(len(data), element_size)
    if count == 1:
        return [data]
    import numpy as np

    elements = np.frombuffer(data, dtype=f"<u{count}")
    # Shifts are vectorized by numpy, strided copies are not.
    return [(elements >> elements.dtype.type(8 * (count - 1 - number))).astype(np.uint8) for number in range(count)]


def _join(planes: list[Any], out: memoryview) -> None:
    if len(planes) == 1:
        out[:] = planes[0]
        return
    import numpy as np

    count = len(planes)
    elements = np.frombuffer(out, dtype=f"<u{count}")
    first = np.frombuffer(planes[0], np.uint8)
    np.left_shift(first, 8 * (count - 1), out=elements, dtype=elements.dtype, casting="unsafe")
    for number in range(1, count):
        plane = np.frombuffer(planes[number], np.uint8)
        shift = 8 * (count - 1 - number)
        np.bitwise_or(elements, plane.astype(elements.dtype) << shift if shift else plane, out=elements)
