"""Ack tokens: what opens them, and that nothing else does."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.ack_tokens import AckHead, AckTokens
from contrail_common.errors import ApiError
from tests.support.each import each

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


OF_0_2 = "BwAAAAMAAAAAAAAATQAAAAFkZWZhdWx0AAAAAAAAACoAAAACwCbs6M5pzXUNKqnU-vvO8w"
"""What 0.2 signed for sequence 42 of ORDERS, billing, with KEY."""


def token(tokens: AckTokens, stream: str = "ORDERS", consumer: str = "billing") -> str:
    return tokens.sign_each(stream, consumer, (3, 77, 1), [41, 42])[1]


def opened(tokens: AckTokens, text: str) -> tuple[AckHead, int | None]:
    return tokens.opener("ORDERS", "billing").open(text)


def assert_forged(tokens: AckTokens, text: str, stream: str = "ORDERS") -> None:
    with pytest.raises(ApiError) as refused:
        tokens.opener(stream, "billing").open(text)
    assert refused.value.spec is errors.TOKEN_FORGED


@given(U32, U64, U32, st.lists(U64 | st.integers(1, 20), min_size=1, unique=True))
def test_tokens_open_to_what_they_were_made_from(
    shard: int, consumer_id: int, epoch: int, seqs: list[int]
) -> None:
    tokens, address = AckTokens("default", [KEY]), (shard, consumer_id, epoch)
    opener = tokens.opener("ORDERS", "billing")
    for made, seq in zip(tokens.sign_each("ORDERS", "billing", address, seqs), seqs, strict=True):
        head, found = opener.open(made)
        assert (head.shard_id, head.consumer_id, head.epoch, found) == (*address, seq)
    head, found = opener.open(tokens.sign_all("ORDERS", "billing", address, seqs))
    assert (head.shard_id, head.consumer_id, head.epoch, found) == (*address, None)
    assert len(head) == len(seqs)
    for first in range(len(seqs)):
        for last in (first, first + 1, len(seqs)):
            assert head.seqs(first, last) == seqs[first : last + 1]


class Watched(tuple[range, ...]):
    """Runs that note which of them are looked at; nobody may go through all."""

    looked_at: ClassVar[list[int]] = []

    def __getitem__(self, at: Any) -> Any:
        self.looked_at.append(at)
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[range]:
        raise AssertionError("all runs were gone through")


def test_ranges_look_at_no_runs_but_their_own() -> None:
    # With every range going through all runs before it, 5,000 ranges took half a minute.
    runs = Watched(range(seq, seq + 2) for seq in range(0, 30_000, 3))
    head = AckHead(1, 1, 1, runs, tuple(range(2, 20_002, 2)))
    assert head.seqs(19_997, 19_998) == [29_995, 29_997]
    assert head.seqs(20_000, 20_001) == []
    assert len(Watched.looked_at) <= 3


def test_token_is_safe_in_urls_and_headers() -> None:
    made = AckTokens("default", [KEY]).sign_all("S", "c", (2**32 - 1, 2**64 - 1, 1), [2**64 - 1])
    assert made.isascii()
    assert made.translate(str.maketrans("", "", "-_.*")).isalnum()


def test_positions_that_were_not_signed_are_forged() -> None:
    tokens = AckTokens("default", [KEY])
    head = token(tokens).removesuffix(".1")
    assert opened(tokens, f"{head}.0")[1] == 41
    for other in ("2", "01", "00", "-1", "+1", " 1", "1 ", "", "1_0", "**", "\u0661", "9" * 5_000):
        assert_forged(tokens, f"{head}.{other}")


def test_tokens_of_the_release_before_are_opened() -> None:
    tokens = AckTokens("default", [KEY])
    head, seq = opened(tokens, OF_0_2)
    assert (head.shard_id, head.consumer_id, head.epoch, seq) == (3, 77, 1, 42)
    # Neither spelling is valid in the place of the other.
    assert_forged(tokens, f"{OF_0_2}.0")
    assert_forged(tokens, token(tokens).removesuffix(".1"))


@given(st.data())
def test_token_with_any_character_changed_is_forged(data: st.DataObject) -> None:
    tokens = AckTokens("default", [KEY])
    made = data.draw(st.sampled_from([token(tokens), OF_0_2]))
    # Another position may be one of the same head, which the client was given too.
    at = data.draw(st.integers(0, len(made.partition(".")[0]) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda char: char != made[at]))
    assert_forged(tokens, made[:at] + other + made[at + 1 :])


@given(st.text(max_size=200) | st.binary(max_size=120).map(lambda raw: raw.decode("latin-1")))
def test_arbitrary_text_is_forged(text: str) -> None:
    assert_forged(AckTokens("default", [KEY]), text)


@each("cut", [1, 2, 3, 10, 60])
def test_shortened_token_is_forged(cut: int) -> None:
    tokens = AckTokens("default", [KEY])
    assert_forged(tokens, token(tokens)[:-cut])


def test_token_of_another_consumer_stream_or_account_is_forged() -> None:
    tokens = AckTokens("default", [KEY])
    assert_forged(tokens, token(tokens, consumer="shipping"))
    assert_forged(tokens, token(tokens, stream="RETURNS"))
    assert_forged(tokens, token(AckTokens("other", [KEY])))


def test_token_of_another_key_is_forged() -> None:
    assert_forged(AckTokens("default", [KEY]), token(AckTokens("default", [OTHER_KEY])))


def test_rotated_key_still_verifies_and_no_longer_signs() -> None:
    before = AckTokens("default", [KEY])
    rotated = AckTokens("default", [OTHER_KEY, KEY])
    assert opened(rotated, token(before))[1] == 42
    assert_forged(before, token(rotated))


@each("keys", [[], [b"short"], [KEY, b""], [b"x" * 65]])
def test_keys_must_be_long_enough(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        AckTokens("default", keys)
