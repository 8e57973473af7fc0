"""Compressed blocks: what comes out is what went in, and no length makes them larger than that."""

import json
import random
import struct

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns import blocks
from contrail_common.columns.blocks import Block, BlockCodec, BlockCorruptError, columns_of
from contrail_common.model import Compression
from contrail_storage.store.block_codecs import BLOCK_CODECS, COMPRESS_FROM, codec_of
from tests.support.each import each

CODEC_AT = 3
PLAIN_SIZE_AT = 24
CRC_AT = 48
HEADER_BYTES = 64
NAMES: tuple[Compression, ...] = ("lz4", "zstd")
CHANCE = random.Random(7)


def block_of(payloads: list[bytes]) -> Block:
    count = len(payloads)
    headers = [{"Type": ["reading"]}] * count
    return Block(
        9,
        np.arange(count, dtype=np.int64),
        np.zeros(count, np.uint32),
        columns_of(payloads, headers),
    )


def readings(count: int) -> list[bytes]:
    return [
        json.dumps({"id": number, "value": CHANCE.random(), "unit": "kelvin"}).encode()
        for number in range(count)
    ]


def codec(name: Compression) -> BlockCodec:
    found = codec_of(name)
    assert found is not None
    return found


def with_sound_sum(stored: bytearray) -> bytes:
    """The block with a checksum that fits, as someone writes it who means harm."""
    stored[CRC_AT : CRC_AT + 4] = bytes(4)
    head, body = bytes(stored[:HEADER_BYTES]), bytes(stored[HEADER_BYTES:])
    struct.pack_into("<I", stored, CRC_AT, crc32c.crc32c(body, crc32c.crc32c(head)))
    return bytes(stored)


READINGS = block_of(readings(200))


@pytest.mark.parametrize("name", NAMES)
@given(payloads=st.lists(st.binary(max_size=4_000), min_size=1, max_size=20))
def test_messages_of_a_compressed_block_are_those_that_went_in(
    name: Compression, payloads: list[bytes]
) -> None:
    block = block_of([payload * 3 for payload in payloads])
    plain = blocks.encode_block(block, 5)
    stored = blocks.encode_block(block, 5, codec(name))
    decoded = blocks.decode_block(stored, BLOCK_CODECS)
    assert len(stored) <= len(plain)
    assert decoded.columns == block.columns
    assert decoded.stored_bytes == block.stored_bytes == len(plain)
    assert decoded.base_seq == 9
    assert (decoded.times_ns == block.times_ns).all()
    assert (decoded.subject_ids == block.subject_ids).all()


@pytest.mark.parametrize(("name", "number"), [("lz4", 1), ("zstd", 2)])
def test_block_names_its_codec_and_is_smaller(name: Compression, number: int) -> None:
    plain = blocks.encode_block(READINGS, 5)
    stored = blocks.encode_block(READINGS, 5, codec(name))
    assert (plain[CODEC_AT], stored[CODEC_AT]) == (0, number)
    assert len(stored) * 2 < len(plain)


def test_nothing_is_compressed_without_a_codec_below_the_bound_or_in_vain() -> None:
    assert codec_of("none") is None
    small = block_of([b"a" * (COMPRESS_FROM // 2)])
    random_bytes = block_of([CHANCE.randbytes(20_000)])
    for block in (small, random_bytes):
        assert blocks.encode_block(block, 5, codec("zstd")) == blocks.encode_block(block, 5)


def test_body_above_the_bound_is_stored_as_it_is_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PLAIN_BYTES_MAX", 10_000)
    stored = blocks.encode_block(READINGS, 5, codec("lz4"))
    assert stored[CODEC_AT] == 0
    assert blocks.decode_block(stored, BLOCK_CODECS).columns == READINGS.columns


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_any_changed_bit_of_a_compressed_block_is_noticed(
    name: Compression, draw: st.DataObject
) -> None:
    stored = bytearray(blocks.encode_block(READINGS, 5, codec(name)))
    at = draw.draw(st.integers(0, len(stored) * 8 - 1))
    stored[at // 8] ^= 1 << at % 8
    with pytest.raises(BlockCorruptError):
        blocks.decode_block(bytes(stored), BLOCK_CODECS)


@each("name", NAMES)
@each("off", [-1, 1, 1_000_000, (1 << 32) - 1])
def test_false_plain_size_under_a_sound_sum_is_refused(name: Compression, off: int) -> None:
    stored = bytearray(blocks.encode_block(READINGS, 5, codec(name)))
    (size,) = struct.unpack_from("<I", stored, PLAIN_SIZE_AT)
    struct.pack_into("<I", stored, PLAIN_SIZE_AT, min(size + off, (1 << 32) - 1))
    with pytest.raises(BlockCorruptError):
        blocks.decode_block(with_sound_sum(stored), BLOCK_CODECS)


@pytest.mark.parametrize("name", NAMES)
def test_body_that_would_grow_beyond_every_block_is_not_decompressed(name: Compression) -> None:
    bomb = codec(name).compress(bytes(64 << 20))
    stored = bytearray(blocks.encode_block(READINGS, 5, codec(name))[:HEADER_BYTES] + bomb)
    struct.pack_into("<II", stored, PLAIN_SIZE_AT, 64 << 20, len(bomb))
    with pytest.raises(BlockCorruptError, match="larger than the maximum"):
        blocks.decode_block(with_sound_sum(stored), BLOCK_CODECS)
    struct.pack_into("<I", stored, PLAIN_SIZE_AT, 1_000)
    with pytest.raises(BlockCorruptError, match="decompress"):
        blocks.decode_block(with_sound_sum(stored), BLOCK_CODECS)


def test_unknown_codec_is_named() -> None:
    stored = bytearray(blocks.encode_block(READINGS, 5, codec("lz4")))
    stored[CODEC_AT] = 77
    with pytest.raises(BlockCorruptError, match="unknown codec 77"):
        blocks.decode_block(with_sound_sum(stored), BLOCK_CODECS)
