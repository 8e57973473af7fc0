"""Frame ends are found wherever the bytes of a socket are cut."""

from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Opcode

from contrail_edge.ws.websocket import frame_head
from contrail_serve.forwarding.frame_ends import FrameEnds

ANSWER = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
LENGTHS = (0, 1, 125, 126, 127, 300, 65_535, 65_536)
lengths = st.lists(st.sampled_from(LENGTHS), max_size=6)


def frame(length: int) -> bytes:
    return frame_head(Opcode.BINARY, length) + b"\r" * length


@given(lengths, st.randoms(use_true_random=False), st.integers(1, 8))
def test_ends_are_those_of_whole_frames(lengths: list[int], chance: object, cuts: int) -> None:
    parts = [ANSWER, *map(frame, lengths)]
    data = b"".join(parts)
    true_ends = {sum(map(len, parts[: count + 1])) for count in range(len(parts))}
    at = sorted(chance.randint(0, len(data)) for _ in range(cuts))  # type: ignore[attr-defined]
    ends = FrameEnds()
    for start, stop in zip([0, *at], [*at, len(data)], strict=True):
        first = ends.feed(data[start:stop])
        if start < stop:
            assert ends.between is (stop in true_ends)
            within = [end - start for end in true_ends if start < end <= stop]
            assert first == min(within, default=None)
    assert ends.between


def test_every_byte_by_itself_is_enough() -> None:
    ends = FrameEnds()
    whole = ANSWER + frame(126)
    found = [at for at, byte in enumerate(whole, 1) if ends.feed(bytes([byte])) is not None]
    assert found == [len(ANSWER), len(whole)]


def test_answer_that_opens_no_socket_has_no_end() -> None:
    ends = FrameEnds()
    assert ends.feed(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\n{}") is None
    assert not ends.between


def test_answer_without_end_is_not_kept() -> None:
    ends = FrameEnds()
    for _ in range(100):
        assert ends.feed(ANSWER[:-4] + bytes(4096)) is None
    assert not ends.between
