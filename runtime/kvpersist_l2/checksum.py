"""CRC32, as fast as this environment has it."""

from __future__ import annotations

import zlib

from kvpersist.core.frames import Crc32


def fastest_crc32() -> Crc32:
    """isal's CRC32 where that package is installed, else zlib's: the same values, at about a fifth of the speed."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    crc32: Crc32 = isal_zlib.crc32
    return crc32
