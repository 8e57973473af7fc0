"""Opaque page tokens: where the next page of a listing begins."""

import base64
import binascii

from contrail_common import errors
from contrail_common.errors import ApiError


def encode_token(position: str) -> str:
    """The token of the page behind ``position``."""
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def decode_token(token: str) -> str:
    """The position in ``token``, "" for the first page; BAD_REQUEST for a foreign token."""
    padded = token.translate(_FROM_URL) + "=" * (-len(token) % 4)
    try:
        position = base64.b64decode(padded, validate=True).decode()
    except (binascii.Error, ValueError):
        position = ""
    if bool(position) != bool(token):
        raise ApiError(errors.BAD_REQUEST, "the page token is not one of ours", applied=False)
    return position


def decode_number(token: str) -> int:
    """The position in ``token`` as a number, 0 for the first page."""
    position = decode_token(token)
    if position and not (position.isascii() and position.isdigit()):
        raise ApiError(errors.BAD_REQUEST, "the page token is not one of ours", applied=False)
    return int(position or 0)


_FROM_URL = str.maketrans("-_", "+/")
