"""Frames: the format of one KV object on disk, readable with nothing but the standard library.

A frame is one header page and the stored payload, zero-padded to a whole page. The header names the key that the frame
belongs to, and one CRC32 covers every byte of the file, so a file that was damaged, cut, lengthened or renamed is never
taken for the object that is asked for. docs/frame-format.md describes every byte.

The checksum continues from the payload into the header page, so a writer can finish it last: it writes the payload
piece by piece and the header page at the end.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple, Protocol

PAGE = 4096
MAGIC = b"KVPF"
VERSION = 1
FORMAT_NAME = f"kvpersist-frame-v{VERSION}"

CODEC_NONE = 0
CODEC_ZSTD = 1
CODEC_LZ4 = 2
CODEC_NAMES = {CODEC_NONE: "none", CODEC_ZSTD: "zstd", CODEC_LZ4: "lz4"}

MAX_HASH_BYTES = 64
MAX_SCOPE_BYTES = 2048
MAX_SALT_BYTES = 512

_FIXED = struct.Struct("<4sBBHQQI")
_KEY = struct.Struct("<QIBBHHHI")
_KEY_OFFSET = _FIXED.size
_TEXT_OFFSET = _KEY_OFFSET + _KEY.size
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_OFFSET = 24
_ZERO_PAGE = bytes(PAGE)
_READ_BYTES = 1 << 20

Buffer = memoryview
Crc32 = Callable[[Buffer, int], int]


class PageBuffer(Protocol):
    """What a header page is packed into: a bytearray or a writable memoryview of :data:`PAGE` bytes."""

    def __len__(self) -> int: ...

    def __setitem__(self, key: slice, value: bytes, /) -> None: ...


class Damage(enum.Enum):
    """Why a file is not the frame that was asked for."""

    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    TRUNCATED = "truncated"
    LENGTH = "length"
    KEY = "key"
    DTYPE = "dtype"
    CHECKSUM = "checksum"


class FrameError(Exception):
    """A file is not the frame that was asked for.

    Args:
        damage: what is wrong with it.
        detail: the values that show it, without a full stop.
    """

    def __init__(self, damage: Damage, detail: str) -> None:
        self.damage = damage
        super().__init__(f"{damage.value}: {detail}")


class FrameKey(NamedTuple):
    """The key that a frame is bound to: LMCache's ObjectKey, independent of where the model folder lies.

    Args:
        scope: the namespace where the model name ends in one, else the whole model name.
        kv_rank: LMCache's packed world size and rank.
        object_group: LMCache's object group.
        chunk_hash: hash of the chunk's tokens and all before them.
        cache_salt: isolation salt of the request, often empty.

    Source: lmcache 0.5.6, ``v1/distributed/api.py``, ``ObjectKey``.
    """

    scope: str
    kv_rank: int
    object_group: int
    chunk_hash: bytes
    cache_salt: str


class Header(NamedTuple):
    """What a header page says.

    Args:
        key: the key that the frame belongs to.
        codec: one of the ``CODEC_`` numbers.
        element_size: bytes of one element of the object, 1 where unknown.
        raw_length: bytes of the object.
        stored_length: bytes of the payload without padding.
        dtype_code: :func:`dtype_code` of the object.
        piece_length: raw bytes in each piece of a compressed payload but the last, 0 without a codec.
        checksum: CRC32 over the padded payload and the header page with this field zero.
    """

    key: FrameKey
    codec: int
    element_size: int
    raw_length: int
    stored_length: int
    dtype_code: int = 0
    piece_length: int = 0
    checksum: int = 0


def dtype_code(names: Sequence[str]) -> int:
    """What a frame keeps of an object's dtypes: 16 bits that differ between all dtypes that KV has.

    The same bytes mean other numbers in another dtype, and many dtypes are of one size.

    Args:
        names: as torch names them, without ``torch.``; several where elements of different dtypes are mixed.
    """
    return zlib.crc32(",".join(names).encode()) & 0xFFFF


def whole_pages(length: int) -> int:
    """Bytes of the whole pages that hold ``length`` bytes."""
    return (length + PAGE - 1) // PAGE * PAGE


def file_length(stored_length: int) -> int:
    """Bytes of a frame's file: the header page and the padded payload."""
    return PAGE + whole_pages(stored_length)


def pack_header(page: PageBuffer, header: Header) -> None:
    """Fills a header page, leaving the checksum zero; :func:`seal` sets it.

    Args:
        page: writable buffer of :data:`PAGE` bytes; every byte is overwritten.
        header: its ``checksum`` is ignored.

    Raises:
        ValueError: when the key does not fit the format's limits.
    """
    scope, salt = _encoded(header.key)
    chunk_hash = header.key.chunk_hash
    text = chunk_hash + scope + salt
    page[0:PAGE] = _ZERO_PAGE
    page[0:_KEY_OFFSET] = _FIXED.pack(MAGIC, VERSION, header.codec, 0, header.raw_length, header.stored_length, 0)
    page[_KEY_OFFSET:_TEXT_OFFSET] = _KEY.pack(
        header.key.kv_rank,
        header.key.object_group,
        header.element_size,
        len(chunk_hash),
        len(scope),
        len(salt),
        header.dtype_code,
        header.piece_length,
    )
    page[_TEXT_OFFSET : _TEXT_OFFSET + len(text)] = text


def seal(page: PageBuffer, checksum: int) -> None:
    """Sets the checksum of a packed header page: CRC32 of that page, continued from the CRC32 of the padded payload."""
    page[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + _CHECKSUM.size] = _CHECKSUM.pack(checksum)


def check_key(key: FrameKey) -> None:
    """Checks that a key can be stored.

    Raises:
        ValueError: for a text or hash that is too long, an empty hash, or a number out of range.
    """
    _encoded(key)


def parse_header(page: bytes | bytearray | memoryview, size: int) -> Header:
    """Reads a header page. What it says is trusted only once :func:`check_checksum` has seen the whole frame.

    Args:
        page: the first bytes of a file, at most :data:`PAGE`.
        size: bytes of the file.

    Raises:
        FrameError: for anything that is not a whole frame of this version.
    """
    if size < PAGE or len(page) < PAGE:
        raise FrameError(Damage.TRUNCATED, f"{size} bytes, a header page has {PAGE}")
    magic, version, codec, flags, raw_length, stored_length, checksum = _FIXED.unpack_from(page, 0)
    if magic != MAGIC:
        raise FrameError(Damage.MAGIC, f"it starts with {bytes(magic).hex()}, a frame with {MAGIC.hex()}")
    if version != VERSION:
        raise FrameError(Damage.VERSION, f"version {version}, this program reads {VERSION}")
    key, element_size, code, piece_length = _parse_key(page)
    if codec not in CODEC_NAMES or flags or not element_size:
        raise FrameError(Damage.HEADER, f"codec {codec}, flags {flags}, element size {element_size}")
    if codec == CODEC_NONE and raw_length != stored_length:
        raise FrameError(Damage.LENGTH, f"{stored_length} bytes stored for {raw_length} without a codec")
    expected = file_length(stored_length)
    if size < expected:
        raise FrameError(Damage.TRUNCATED, f"{size} bytes, its header says {expected}")
    if size > expected:
        raise FrameError(Damage.LENGTH, f"{size} bytes, its header says {expected}")
    return Header(key, codec, element_size, raw_length, stored_length, code, piece_length, checksum)


def check_key_matches(header: Header, key: FrameKey) -> None:
    """Compares the key in a header with the one asked for.

    Raises:
        FrameError: when they differ.
    """
    if header.key != key:
        raise FrameError(Damage.KEY, f"it belongs to {header.key}")


def check_checksum(page: PageBuffer, header: Header, payload_checksum: int, crc32: Crc32 = zlib.crc32) -> None:
    """Compares the checksum of a frame whose payload has been read; sets the checksum field of ``page`` to zero.

    Args:
        page: the header page, writable.
        header: what was parsed from it.
        payload_checksum: CRC32 of the payload with its padding.
        crc32: any implementation of zlib's CRC32.

    Raises:
        FrameError: when a byte of the frame is not what was written.
    """
    seal(page, 0)
    found = crc32(memoryview(page), payload_checksum)  # type: ignore[arg-type]
    if found != header.checksum:
        raise FrameError(Damage.CHECKSUM, f"{found:08x}, its header says {header.checksum:08x}")


def verify(
    stream: BinaryIO,
    size: int,
    *,
    key: FrameKey | None = None,
    crc32: Crc32 = zlib.crc32,
    on_bytes: Callable[[int], None] | None = None,
) -> Header:
    """Reads a whole frame at rest and checks every byte of it.

    Args:
        stream: an unread file, opened in binary mode.
        size: bytes of the file.
        key: the key that the file's name stands for, where it is known.
        crc32: any implementation of zlib's CRC32.
        on_bytes: called with the number of bytes after each read, e.g. to limit the rate.

    Raises:
        FrameError: for any damage.
    """
    page = bytearray(stream.read(PAGE))
    header = parse_header(page, size)
    if key is not None:
        check_key_matches(header, key)
    checksum, left = 0, size - PAGE
    while left:
        piece = stream.read(min(left, _READ_BYTES))
        if not piece:
            raise FrameError(Damage.TRUNCATED, f"{left} of {size} bytes are missing")
        checksum = crc32(memoryview(piece), checksum)
        left -= len(piece)
        if on_bytes is not None:
            on_bytes(len(piece))
    check_checksum(page, header, checksum, crc32)
    return header


def _encoded(key: FrameKey) -> tuple[bytes, bytes]:
    scope, salt = key.scope.encode(), key.cache_salt.encode()
    if not 0 < len(key.chunk_hash) <= MAX_HASH_BYTES:
        raise ValueError(f"a chunk hash has 1 to {MAX_HASH_BYTES} bytes, this one {len(key.chunk_hash)}")
    if not 0 < len(scope) <= MAX_SCOPE_BYTES:
        raise ValueError(f"a model name has 1 to {MAX_SCOPE_BYTES} bytes, this one {len(scope)}")
    if len(salt) > MAX_SALT_BYTES:
        raise ValueError(f"a cache salt has at most {MAX_SALT_BYTES} bytes, this one {len(salt)}")
    if not (0 <= key.kv_rank < 1 << 64 and 0 <= key.object_group < 1 << 32):
        raise ValueError(f"kv_rank {key.kv_rank} or object group {key.object_group} is out of range")
    return scope, salt


def _parse_key(page: bytes | bytearray | memoryview) -> tuple[FrameKey, int, int, int]:
    kv_rank, group, element_size, hash_length, scope_length, salt_length, code, piece_length = _KEY.unpack_from(
        page, _KEY_OFFSET
    )
    end = _TEXT_OFFSET + hash_length + scope_length + salt_length
    if end > PAGE:
        raise FrameError(Damage.HEADER, f"its key fields say {end} bytes")
    text = bytes(page[_TEXT_OFFSET:end])
    scope_end = hash_length + scope_length
    try:
        key = FrameKey(
            text[hash_length:scope_end].decode(), kv_rank, group, text[:hash_length], text[scope_end:].decode()
        )
    except UnicodeDecodeError:
        raise FrameError(Damage.HEADER, "its key is not UTF-8") from None
    return key, element_size, code, piece_length
