"""Ack tokens: what opens them, and that nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.ack_tokens import AckAddress, AckTokens
from contrail_common.errors import ApiError
from tests.support.each import each

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def token(tokens: AckTokens, stream: str = "ORDERS", consumer: str = "billing") -> str:
    return tokens.signer(stream, consumer, 3, 77, 1)(42, 2)


def assert_forged(tokens: AckTokens, text: str, stream: str = "ORDERS") -> None:
    with pytest.raises(ApiError) as refused:
        tokens.opener(stream, "billing")(text)
    assert refused.value.spec is errors.TOKEN_FORGED


@given(U32, U64, U32, U64, U32)
def test_token_opens_to_what_it_was_made_from(
    shard: int, consumer_id: int, epoch: int, seq: int, attempt: int
) -> None:
    tokens = AckTokens("default", [KEY])
    made = tokens.signer("ORDERS", "billing", shard, consumer_id, epoch)(seq, attempt)
    opened = tokens.opener("ORDERS", "billing")(made)
    assert opened == AckAddress(shard, consumer_id, epoch, seq, attempt)


def test_token_is_safe_in_urls_and_headers() -> None:
    made = AckTokens("default", [KEY]).signer("S", "c", 2**32 - 1, 2**64 - 1, 1)(
        2**64 - 1, 2**32 - 1
    )
    assert made.isascii()
    assert made.replace("-", "").replace("_", "").isalnum()


@given(st.data())
def test_token_with_any_character_changed_is_forged(data: st.DataObject) -> None:
    tokens = AckTokens("default", [KEY])
    made = token(tokens)
    at = data.draw(st.integers(0, len(made) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda char: char != made[at]))
    assert_forged(tokens, made[:at] + other + made[at + 1 :])


@given(st.text(max_size=200) | st.binary(max_size=120).map(lambda raw: raw.decode("latin-1")))
def test_arbitrary_text_is_forged(text: str) -> None:
    assert_forged(AckTokens("default", [KEY]), text)


@each("cut", [1, 2, 10, 60])
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
    assert rotated.opener("ORDERS", "billing")(token(before)).seq == 42
    assert_forged(before, token(rotated))


@each("keys", [[], [b"short"], [KEY, b""], [b"x" * 65]])
def test_keys_must_be_long_enough(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        AckTokens("default", keys)
