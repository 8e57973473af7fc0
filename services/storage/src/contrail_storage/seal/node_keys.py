"""Node keys in the form of a key file: text with one key per line, the current key first."""

import base64
import binascii
import re
from typing import Final

NODE_KEY_BYTES: Final = 32
NODE_KEYS_MAX: Final = 16
_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")


class NodeKeyError(ValueError):
    """The text has no usable keys. The message names the line and shows nothing of it."""


def parse_node_keys(text: str) -> tuple[bytes, ...]:
    """Return the keys in ``text``, 32 bytes each. A line is 64 hex digits or base64.

    Empty lines are skipped. Raises NodeKeyError without a key, or with more than NODE_KEYS_MAX.
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
        # Hex first: 64 hex digits are also valid base64, but of 48 bytes, which is no key.
        is_hex = _HEX.fullmatch(line)
        key = bytes.fromhex(line) if is_hex else base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != NODE_KEY_BYTES:
        # The message does not show the line: it may be a real key with one wrong character.
        raise NodeKeyError(f"line {number} is not {NODE_KEY_BYTES} bytes in hex digits or base64")
    return key
