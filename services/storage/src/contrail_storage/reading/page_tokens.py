"""Opaque page tokens: where the next page of a listing begins."""

import base64
import binascii
from typing import Final, TypeVar

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError

_S = TypeVar("_S", bound=msgspec.Struct)
_FROM_URL: Final = str.maketrans("-_", "+/")


def encode_token(position: str) -> str:
    """Return the token of the page after ``position``."""
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def decode_token(token: str) -> str:
    """Return the position in ``token``, "" for the first page; BAD_REQUEST for a foreign token."""
    padded = token.translate(_FROM_URL) + "=" * (-len(token) % 4)
    try:
        position = base64.b64decode(padded, validate=True).decode()
    except (binascii.Error, ValueError):
        position = ""
    # Empty means the first page. A token that decodes to nothing is not one of ours.
    if bool(position) != bool(token):
        raise ApiError(errors.BAD_REQUEST, "the page token is invalid", applied=False)
    return position


def decode_number(token: str) -> int:
    """Return the position in ``token`` as a number, 0 for the first page; else BAD_REQUEST."""
    position = decode_token(token)
    if position and not (position.isascii() and position.isdigit()):
        raise ApiError(errors.BAD_REQUEST, "the page token is invalid", applied=False)
    return int(position or 0)


def encode_state(state: msgspec.Struct) -> str:
    """Return the token of a page that needs more than one position to continue."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(state)).decode().rstrip("=")


def decode_state(token: str, shape: type[_S]) -> _S:
    """Return the state in ``token``; BAD_REQUEST for a foreign token."""
    padded = token.translate(_FROM_URL) + "=" * (-len(token) % 4)
    try:
        data = base64.b64decode(padded, validate=True)
        return msgspec.msgpack.decode(data, type=shape)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise ApiError(errors.BAD_REQUEST, "the page token is invalid", applied=False) from None
