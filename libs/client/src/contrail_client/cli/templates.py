"""Placeholders in what `contrail pub --template` publishes. Pure but for the clock and chance."""

import random
import re
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from contrail_client.cli.ending import Misuse
from contrail_client.times import time_text

_PLACEHOLDER: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_RANDOM_MAX: Final = 1_000_000
_FILLERS: Final[Mapping[str, Callable[[int], str]]] = {
    "count": str,
    "time": lambda _: time_text(datetime.now(UTC)),
    "unix_ns": lambda _: str(time.time_ns()),
    "random": lambda _: str(random.randrange(_RANDOM_MAX)),
    "id": lambda _: secrets.token_hex(8),
}
NAMES: Final = ", ".join(f"{{{{{name}}}}}" for name in _FILLERS)


def fill(text: str, count: int) -> str:
    """`text` with its placeholders filled in for the message number `count`; Misuse."""

    def filled(found: re.Match[str]) -> str:
        filler = _FILLERS.get(found[1])
        if filler is None:
            raise Misuse(f"unknown placeholder {found[0]}; known are {NAMES}")
        return filler(count)

    return _PLACEHOLDER.sub(filled, text)
