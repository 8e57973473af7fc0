"""The words behind a command: positional ones, ``option=value`` and ``Header-Name=value``."""

import re
import shlex
from typing import Any, Final

from contrail_common.timeunits import parse_duration

_NAMED: Final = re.compile(r"([A-Za-z][\w-]*)=(.*)", re.DOTALL)
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_LISTS: Final = ("subjects", "filter_subjects", "backoff")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}


class ArgumentError(Exception):
    """A command's arguments are not what it takes."""


class Arguments:
    """Words that a command takes one after the other; what it leaves over is an error."""

    def __init__(self, words: list[str]) -> None:
        self._words: list[str] = []
        self._named: dict[str, str] = {}
        for word in words:
            named = _NAMED.fullmatch(word)
            if named is None:
                self._words.append(word)
            elif named[1] in self._named:
                raise ArgumentError(f"{named[1]} is given twice")
            else:
                self._named[named[1]] = named[2]

    def word(self, name: str, default: str | None = None) -> str:
        """The next positional word."""
        if self._words:
            return self._words.pop(0)
        if default is None:
            raise ArgumentError(f"{name} is missing")
        return default

    def integer(self, name: str) -> int:
        """The next positional word, a whole number."""
        return _integer(name, self.word(name))

    def duration_ns(self, name: str) -> int:
        """The next positional word, a duration."""
        return _duration_ns(name, self.word(name))

    def integers(self, name: str) -> list[int]:
        """All positional words that are left, at least one: numbers and ranges such as ``2-5``."""
        found: list[int] = []
        while self._words or not found:
            word = self.word(name)
            several = _RANGE.fullmatch(word)
            if several is None:
                found.append(_integer(name, word))
            else:
                found += range(int(several[1]), int(several[2]) + 1)
        return found

    def option(self, name: str, default: str = "") -> str:
        """The value of ``name=``."""
        return self._named.pop(name, default)

    def integer_option(self, name: str, default: int = 0) -> int:
        """The value of ``name=``, a whole number."""
        return _integer(name, self._named.pop(name, str(default)))

    def duration_option_ns(self, name: str) -> int:
        """The value of ``name=``, a duration; 0 when it is not given."""
        return _duration_ns(name, self._named.pop(name, "0"))

    def flag(self, name: str) -> bool:
        """Whether ``name=yes`` is given."""
        text = self._named.pop(name, "no")
        if text not in ("yes", "no"):
            raise ArgumentError(f"{name} is yes or no, not {text!r}")
        return text == "yes"

    def headers(self) -> dict[str, list[str]]:
        """What is named with a capital letter: message headers."""
        names = [name for name in self._named if name[0].isupper()]
        return {name: [self._named.pop(name)] for name in names}

    def fields(self) -> dict[str, Any]:
        """Everything named that is left, as the fields of a JSON object."""
        fields, self._named = self._named, {}
        return {name: _value(name, text) for name, text in fields.items()}

    def end(self) -> None:
        """Raises ArgumentError when something is left over."""
        left = [*self._words, *(f"{name}=" for name in self._named)]
        if left:
            raise ArgumentError(f"not understood: {' '.join(left)}")


def split_words(command: str) -> list[str]:
    """The words of a command line; quotes hold spaces together."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"{name} is a whole number, not {text!r}") from None


def _duration_ns(name: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ArgumentError(f"{name}: {error}") from None


def _value(name: str, text: str) -> Any:
    if name in _LISTS:
        return text.split(",") if text else []
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return int(text) if text.removeprefix("-").isdecimal() else text
