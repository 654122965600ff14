"""Frames to and from open files, piece by piece: no buffer of an object's size is ever made.

Raw objects go straight between LMCache's memory and the file. Each piece's checksum is computed while the piece is in
the CPU's cache, which costs next to nothing beside the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Callable

from kvpersist.core import frames
from kvpersist.core.frames import PAGE, Crc32, Damage, FrameError, FrameKey, Header

from .codecs import MAX_STORED_PIECE, PIECE, Codec
from .read_rates import DIRECT, ReadRates

# One system call of this size keeps the page cache's readahead ahead of the reader; measured best from 1 to 4 MiB.
BUFFERED_PIECE = 1 << 20
# Without the page cache the device sees each call as it is. A read of this size fills it and leaves the checksum of one
# piece, not of the whole object, for when the last byte is there.
DIRECT_READ_PIECE = 8 << 20
# Stores go out in one call as a rule, the header page with it.
DIRECT_WRITE_PIECE = 64 << 20
# Objects up to this size are read through the page cache: looking for them there costs more than it may save.
_SMALL = 256 << 10

_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 2  # include/uapi/linux/fs.h

_ZERO = bytes(PAGE)
_STAGING_KEPT = frames.whole_pages(MAX_STORED_PIECE) + PAGE


class NotAFileError(Exception):
    """A folder, a link or a device stands where an object should be."""


class ExpiredError(Exception):
    """The time within which LMCache's memory is ours has passed."""


@dataclass(frozen=True)
class Memory:
    """LMCache's memory of one object.

    Args:
        data: its bytes.
        element_size: bytes of one element, 1 where elements of different sizes are mixed.
        dtype_code: :func:`kvpersist.core.frames.dtype_code` of its dtypes.
        is_aligned: whether it starts at a page, which direct I/O needs.
    """

    data: memoryview
    element_size: int
    dtype_code: int
    is_aligned: bool


class Scratch(threading.local):
    """Page-aligned buffers of one thread, made once."""

    def __init__(self) -> None:
        pages = memoryview(mmap.mmap(-1, 2 * PAGE))
        self.header, self.tail = pages[:PAGE], pages[PAGE:]
        self._staging: memoryview | None = None

    @property
    def staging(self) -> memoryview:
        """Room for compressed bytes: what is kept of one piece, and the next read or write behind it."""
        if self._staging is None:
            self._staging = memoryview(mmap.mmap(-1, _STAGING_KEPT + BUFFERED_PIECE))
        return self._staging


@dataclass(frozen=True)
class Io:
    """How files are read and written.

    Args:
        mode: auto, buffered or direct.
        crc32: any implementation of zlib's CRC32.
        scratch: buffers of the calling thread.
        read_rates: what auto learns about the disk.
    """

    mode: str
    crc32: Crc32
    scratch: Scratch
    read_rates: ReadRates

    @contextmanager
    def way(self, length: int, is_cached: Callable[[], bool]) -> Iterator[bool]:
        """Around a read of ``length`` bytes: whether it goes past the page cache. The one place that decides it."""
        if self.mode != "auto":
            yield self.mode == "direct"
        elif length <= _SMALL or is_cached():
            yield False
        else:
            with self.read_rates.cold_read(length) as way:
                yield way == DIRECT

    def writes_directly(self) -> bool:
        """Whether payloads are written past the page cache: not in auto, where it takes bursts at memory speed."""
        return self.mode == "direct"


class FrameFile:
    """One open file; leaves direct I/O where the filesystem refuses it.

    Args:
        path: its path.
        flags: flags for open(2).
        waiting: entered while the device is waited for.

    Raises:
        OSError: when it cannot be opened.
    """

    def __init__(self, path: str, flags: int, waiting: AbstractContextManager[None]) -> None:
        # A fifo would block without O_NONBLOCK; regular files do not mind it.
        self._flags = flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self.descriptor = os.open(path, self._flags, 0o600)
        self._waiting = waiting
        self._is_direct = False
        self._may_be_cached = True
        self._reads_ahead = True

    def __enter__(self) -> FrameFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    @property
    def read_piece(self) -> int:
        """Bytes to read at once."""
        return DIRECT_READ_PIECE if self._is_direct else BUFFERED_PIECE

    @property
    def write_piece(self) -> int:
        """Bytes to write at once."""
        return DIRECT_WRITE_PIECE if self._is_direct else BUFFERED_PIECE

    def go_direct(self) -> None:
        """Leaves the page cache aside from now on, where the filesystem can."""
        self._is_direct = self._set_direct(True)

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fills buffers, one after the other.

        Raises:
            FrameError: where the file ends before.
        """
        left = list(views)
        if not self._is_direct and not self._reads_ahead:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_NORMAL)
            self._reads_ahead = True
        if not self._is_direct and self._may_be_cached:
            count = self._read_cached(left, offset)
            offset += count
            left = _after(left, count)
            self._may_be_cached = not left
        while left:
            try:
                with self._waiting:
                    count = os.preadv(self.descriptor, left, offset)
            except OSError:
                if not self._leave_direct():
                    raise
                continue
            if not count:
                raise FrameError(Damage.TRUNCATED, f"it ends at {offset} bytes")
            offset += count
            left = _after(left, count)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Writes buffers, one after the other."""
        left = list(views)
        while left:
            try:
                with self._waiting if self._is_direct else contextlib.nullcontext():
                    count = os.pwritev(self.descriptor, left, offset)
            except OSError:
                if not self._leave_direct():
                    raise
                continue
            offset += count
            left = _after(left, count)

    def start_writeback(self) -> None:
        """Has the kernel write what the page cache took, now: left to pile up, it is written in slow bursts."""
        if not self._is_direct:
            with self._waiting:
                _sync_file_range(self.descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)  # no more than a wish: errors are fine

    def is_cached(self, pages: Sequence[tuple[memoryview, int]]) -> bool:
        """Whether the page cache holds parts of the file, each of them a buffer and its offset."""
        # Else a miss would start reading ahead.
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._reads_ahead = False
        return all(self._read_cached([view], offset) == len(view) for view, offset in pages)

    def _read_cached(self, views: Sequence[memoryview], offset: int) -> int:
        """Reads what the page cache holds, without waiting for the device.

        Returns:
            Bytes read; 0 also where a filesystem cannot tell.
        """
        try:
            return os.preadv(self.descriptor, views, offset, os.RWF_NOWAIT)
        except OSError:
            return 0

    def _leave_direct(self) -> bool:
        # Some filesystems take the flag and refuse the transfer. A real error comes again without it.
        was_direct, self._is_direct = self._is_direct, False
        if was_direct:
            self._set_direct(False)
        return was_direct

    def _set_direct(self, wanted: bool) -> bool:
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, self._flags | os.O_DIRECT if wanted else self._flags)
        except OSError:
            return False
        return wanted


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers once their first bytes are done."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def write_frame(file: FrameFile, key: FrameKey, memory: Memory, codec: Codec | None, io: Io, deadline: float) -> int:
    """Writes a frame into a new file.

    Args:
        file: open for writing, empty.
        key: the key that it belongs to.
        memory: the object.
        codec: None stores it as it is.
        io: how to write.
        deadline: ``time.monotonic()`` after which the memory may hold another object.

    Returns:
        Bytes of the file.

    Raises:
        ExpiredError: past the deadline; the file is then worthless.
        OSError: when it cannot be written.
    """
    raw_length = len(memory.data)
    if memory.is_aligned and io.writes_directly():
        file.go_direct()
    held: list[memoryview] = []
    if codec is None:
        stored_length = raw_length
        checksum, held = _write_raw(file, memory.data, io, deadline)
    else:
        stored_length, checksum = _write_pieces(file, memory, codec, io, deadline)
    number, piece = (frames.CODEC_NONE, 0) if codec is None else (codec.number, PIECE)
    page = io.scratch.header
    frames.pack_header(
        page, Header(key, number, memory.element_size, raw_length, stored_length, memory.dtype_code, piece)
    )
    frames.seal(page, io.crc32(page, checksum))
    file.write([page, *held], 0)
    file.start_writeback()
    _check(deadline)
    return frames.file_length(stored_length)


def read_frame(
    file: FrameFile, key: FrameKey, memory: Memory, codecs: Callable[[int], Codec], io: Io, deadline: float
) -> int:
    """Reads a frame into LMCache's memory. Only when this returns is the memory the object.

    Args:
        file: open for reading.
        key: the key that is asked for.
        memory: where the object belongs.
        codecs: gives the codec of a number; may raise ``CodecUnavailableError``.
        io: how to read.
        deadline: ``time.monotonic()`` after which the memory may belong to another object.

    Returns:
        Bytes of the file.

    Raises:
        FrameError: for any damage.
        NotAFileError: for a folder, link or device.
        ExpiredError: past the deadline.
        OSError: when it cannot be read.
    """
    status = os.fstat(file.descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError
    page, size = io.scratch.header, status.st_size
    if size < PAGE:
        raise FrameError(Damage.TRUNCATED, f"{size} bytes")
    ends = [(page, 0), (io.scratch.tail, size - PAGE)]
    with io.way(size, lambda: file.is_cached(ends)) as is_direct:
        if is_direct and memory.is_aligned:
            file.go_direct()
        _read(file, size, key, memory, codecs, io, deadline)
    return size


def _read(
    file: FrameFile,
    size: int,
    key: FrameKey,
    memory: Memory,
    codecs: Callable[[int], Codec],
    io: Io,
    deadline: float,
) -> None:
    page = io.scratch.header
    # An object stored as it is has this length; its first piece then comes with the header page, in one call.
    first = memory.data[: min(file.read_piece, len(memory.data) // PAGE * PAGE)]
    if size != frames.file_length(len(memory.data)):
        first = first[:0]
    file.read([page, first] if first else [page], 0)
    header = frames.parse_header(page, size)
    frames.check_key_matches(header, key)
    if header.raw_length != len(memory.data):
        raise FrameError(Damage.LENGTH, f"{header.raw_length} bytes, the object has {len(memory.data)}")
    if header.dtype_code != memory.dtype_code:
        raise FrameError(Damage.DTYPE, f"dtype code {header.dtype_code:04x}, the object has {memory.dtype_code:04x}")
    if header.codec == frames.CODEC_NONE:
        checksum = _read_raw(file, memory.data, len(first), io, deadline)
    else:
        checksum = _read_pieces(file, header, memory.data, codecs(header.codec), io, deadline)
    frames.check_checksum(page, header, checksum, io.crc32)
    _check(deadline)


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ExpiredError


def _write_raw(file: FrameFile, data: memoryview, io: Io, deadline: float) -> tuple[int, list[memoryview]]:
    """Writes an object as it is, but for what is so small that it is better written together with the header page."""
    aligned = len(data) // PAGE * PAGE
    checksum = position = 0
    held: list[memoryview] = []
    while position < aligned:
        _check(deadline)
        part = data[position : min(position + file.write_piece, aligned)]
        checksum = io.crc32(part, checksum)
        if len(part) == aligned:
            held = [part]
        else:
            file.write([part], PAGE + position)
        position += len(part)
    if aligned == len(data):
        return checksum, held
    rest, tail = len(data) - aligned, io.scratch.tail
    tail[:rest] = data[aligned:]
    tail[rest:] = _ZERO[rest:]
    checksum = io.crc32(tail, checksum)
    if held or not aligned:
        return checksum, [*held, tail]
    file.write([tail], PAGE + aligned)
    return checksum, []


def _read_raw(file: FrameFile, data: memoryview, done: int, io: Io, deadline: float) -> int:
    """Reads an object that is stored as it is, of which the first ``done`` bytes are there."""
    aligned = len(data) // PAGE * PAGE
    checksum = io.crc32(data[:done], 0)
    while done < aligned:
        _check(deadline)
        part = data[done : min(done + file.read_piece, aligned)]
        file.read([part], PAGE + done)
        checksum = io.crc32(part, checksum)
        done += len(part)
    if aligned == len(data):
        return checksum
    tail = io.scratch.tail
    file.read([tail], PAGE + aligned)
    data[aligned:] = tail[: len(data) - aligned]
    return io.crc32(tail, checksum)


def _write_pieces(file: FrameFile, memory: Memory, codec: Codec, io: Io, deadline: float) -> tuple[int, int]:
    staging = io.scratch.staging
    filled = stored = checksum = 0

    def flush(length: int) -> None:
        nonlocal filled, stored, checksum
        checksum = io.crc32(staging[:length], checksum)
        file.write([staging[:length]], PAGE + stored)
        stored += length
        rest = filled - length
        staging[:rest] = staging[length:filled]
        filled = rest

    for start in range(0, len(memory.data), PIECE):
        _check(deadline)
        for blob in codec.encode_piece(memory.data[start : start + PIECE], memory.element_size):
            view = memoryview(blob).cast("B")
            staging[filled : filled + len(view)] = view
            filled += len(view)
        if filled >= BUFFERED_PIECE:
            flush(filled // PAGE * PAGE)
    length = stored + filled
    if filled:
        padded = frames.whole_pages(filled)
        staging[filled:padded] = bytes(padded - filled)
        filled = padded
        flush(padded)
    return length, checksum


def _read_pieces(file: FrameFile, header: Header, data: memoryview, codec: Codec, io: Io, deadline: float) -> int:
    if header.piece_length != PIECE:
        raise FrameError(Damage.HEADER, f"pieces of {header.piece_length} bytes, this program has {PIECE}")
    # What is left of the stored bytes stands right before a page boundary, where the next read goes on.
    staging, left = io.scratch.staging, memoryview(b"")
    end = frames.whole_pages(header.stored_length)
    unread = header.stored_length
    position = done = checksum = 0
    while done < len(data):
        _check(deadline)
        if len(left) < MAX_STORED_PIECE and position < end:
            length = min(BUFFERED_PIECE, end - position)
            start = _STAGING_KEPT - len(left)
            staging[start:_STAGING_KEPT] = left
            chunk = staging[_STAGING_KEPT : _STAGING_KEPT + length]
            file.read([chunk], PAGE + position)
            checksum = io.crc32(chunk, checksum)
            position += length
            useful = min(length, unread)
            unread -= useful
            left = staging[start : _STAGING_KEPT + useful]
        out = data[done : done + PIECE]
        left = left[codec.decode_piece(left, out, header.element_size) :]
        done += len(out)
    if left or position < end:
        raise FrameError(Damage.LENGTH, "the payload goes on after its last piece")
    return checksum
