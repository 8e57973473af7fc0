"""Codecs of block bodies. Each block names its codec by number."""

from collections.abc import Mapping
from typing import Final, cast

import pyarrow as pa

from contrail_common.columns.blocks import BlockCodec
from contrail_common.model import Compression

COMPRESS_FROM: Final = 4 * 1024
"""Smaller bodies are not compressed: most are merged soon, and zstd takes 15 us to begin."""


class _ArrowCodec:
    """A codec of pyarrow. It releases the GIL, so other threads run meanwhile."""

    min_bytes = COMPRESS_FROM

    def __init__(self, number: int, name: str, level: int | None = None) -> None:
        self.number = number
        self._codec = pa.Codec(name, compression_level=level)

    def compress(self, body: bytes) -> bytes:
        return cast(bytes, self._codec.compress(body, asbytes=True))

    def decompress(self, stored: memoryview, size: int) -> bytes:
        try:
            return cast(bytes, self._codec.decompress(stored, size, asbytes=True))
        except OSError as error:
            raise ValueError(str(error)) from error


_LZ4: Final = _ArrowCodec(1, "lz4_raw")
_ZSTD: Final = _ArrowCodec(2, "zstd", 1)

BLOCK_CODECS: Final[Mapping[int, BlockCodec]] = {codec.number: codec for codec in (_LZ4, _ZSTD)}
"""All codecs by the number in stored blocks."""

_BY_NAME: Final[Mapping[Compression, BlockCodec | None]] = {
    "none": None,
    "lz4": _LZ4,
    "zstd": _ZSTD,
    # JetStream's setting is accepted and shown. pyarrow has no S2, so its blocks are LZ4.
    "s2": _LZ4,
}


def codec_of(compression: Compression) -> BlockCodec | None:
    """The codec for the ``compression`` of a stream; None: blocks are not compressed."""
    return _BY_NAME[compression]
