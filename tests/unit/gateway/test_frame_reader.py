"""Frames are read as the library alone reads them, however they come in pieces."""

import logging
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side

from contrail_edge.ws.frame_reader import FrameReader

MESSAGE_MAX = 400
MASK = b"\x11\x22\x33\x44"
logging.getLogger("websockets").setLevel(logging.CRITICAL)


def library() -> Protocol:
    return Protocol(Side.SERVER, max_size=MESSAGE_MAX)


def masked(data: bytes) -> bytes:
    return bytes(byte ^ MASK[at % 4] for at, byte in enumerate(data))


def frame(first: int, data: bytes, *, form: int | None = None, mask: bool = True) -> bytes:
    """A client's frame; ``form`` 126 or 127 has the length stand in so many bytes."""
    size = len(data)
    form = form or (size if size < 126 else 126)
    head = bytes((first, form | (0x80 if mask else 0)))
    if form == 126:
        head += struct.pack("!H", size)
    elif form == 127:
        head += struct.pack("!Q", size)
    return head + (MASK + masked(data) if mask else data)


Seen = tuple[list[tuple[Opcode, bytes, bool]], list[bytes], str]


def as_the_library_reads(data: bytes) -> Seen:
    wire = library()
    wire.receive_data(data)
    events = [one for one in wire.events_received() if isinstance(one, Frame)]
    found = [(one.opcode, bytes(one.data), one.fin) for one in events]
    return found, wire.data_to_send(), repr(wire.parser_exc)


def as_read_here(data: bytes, cuts: list[int]) -> Seen:
    wire = library()
    reader = FrameReader(wire, Opcode.TEXT)
    found: list[tuple[Opcode, bytes, bool]] = []
    for start, stop in pairwise(sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})):
        for one in reader.read(data[start:stop]):
            if isinstance(one, Frame):
                found.append((one.opcode, bytes(one.data), one.fin))
            else:
                found += [(Opcode.TEXT, message, True) for message in one]
    return found, wire.data_to_send(), repr(wire.parser_exc)


contents = st.binary(max_size=130) | st.integers(395, 405).map(bytes)
firsts = st.sampled_from([0x81, 0x81, 0x81, 0x82, 0x01, 0x00, 0x80, 0x89, 0x8A, 0x88]) | (
    st.integers(0, 255)
)
frames = st.builds(
    frame, firsts, contents, form=st.sampled_from([None, None, 126, 127]),
    mask=st.sampled_from([True, True, True, True, False]),
)  # fmt: skip
cuttings = st.lists(st.integers(0, 1_000), max_size=8)


@given(st.lists(frames, max_size=8), cuttings)
def test_frames_in_any_pieces_are_read_as_the_library_reads_them(
    sent: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(sent)
    assert as_read_here(data, cuts) == as_the_library_reads(data)


@given(st.binary(max_size=60), cuttings)
def test_what_is_no_frame_is_refused_as_the_library_refuses_it(
    data: bytes, cuts: list[int]
) -> None:
    assert as_read_here(data, cuts) == as_the_library_reads(data)


@pytest.mark.parametrize(("size", "refused"), [(MESSAGE_MAX, False), (MESSAGE_MAX + 1, True)])
def test_a_message_at_the_bound_is_read_and_one_above_it_refused(size: int, refused: bool) -> None:
    found, _, problem = as_read_here(frame(0x81, bytes(size)), [])
    assert [len(data) for _, data, _ in found] == ([] if refused else [size])
    assert ("PayloadTooBig" in problem) is refused


def test_a_length_above_the_bound_is_refused_before_the_mask_has_come() -> None:
    wire = library()
    reader = FrameReader(wire, Opcode.TEXT)
    assert list(reader.read(struct.pack("!BBQ", 0x81, 0xFF, 1 << 40))) == []
    assert "PayloadTooBig" in repr(wire.parser_exc)


def test_a_frame_without_a_mask_is_refused_by_its_first_two_bytes() -> None:
    wire = library()
    reader = FrameReader(wire, Opcode.TEXT)
    assert list(reader.read(b"\x81\x02")) == []
    assert "ProtocolError" in repr(wire.parser_exc)


def test_nothing_is_read_after_a_close_frame() -> None:
    wire = library()
    reader = FrameReader(wire, Opcode.TEXT)
    found = list(reader.read(frame(0x88, struct.pack("!H", 1000)) + frame(0x81, b"late")))
    assert [isinstance(one, Frame) for one in found] == [True]
