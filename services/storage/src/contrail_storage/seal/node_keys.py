"""Node keys as people keep them: text, one key a line, the current one first."""

import base64
import binascii
import re
from typing import Final

NODE_KEY_BYTES: Final = 32
NODE_KEYS_MAX: Final = 16
_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")


class NodeKeyError(ValueError):
    """The text holds no usable keys; the message says where and shows nothing of them."""


def parse_node_keys(text: str) -> tuple[bytes, ...]:
    """The keys in ``text``, 32 bytes each: lines of 64 hex digits or of base64; empty ones pass.

    Raises NodeKeyError.
    """
    lines = [
        (number, one) for number, line in enumerate(text.splitlines(), 1) if (one := line.strip())
    ]
    if not lines:
        raise NodeKeyError("it contains no encryption key")
    if len(lines) > NODE_KEYS_MAX:
        raise NodeKeyError(f"it contains more than {NODE_KEYS_MAX} encryption keys")
    return tuple(_parse(number, one) for number, one in lines)


def _parse(number: int, line: str) -> bytes:
    try:
        is_hex = _HEX.fullmatch(line)
        key = bytes.fromhex(line) if is_hex else base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != NODE_KEY_BYTES:
        # The line stays out of the message: it may be all of a key but for a slip.
        raise NodeKeyError(f"line {number} is not {NODE_KEY_BYTES} bytes in hex digits or base64")
    return key
