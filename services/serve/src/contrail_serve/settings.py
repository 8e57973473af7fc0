"""Settings of ``contrail serve``, checked once, with a sentence for each mistake."""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

DEFAULT_PORT: Final = 7420
_KNOWN: Final = frozenset(
    {
        "host",
        "port",
        "data_dir",
        "token",
        "token_file",
        "log_level",
        "log_format",
        "fast_lane",
        "allowed_hosts",
        "allowed_origins",
        "max_payload",
    }
)
_FLAGS: Final = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_LEVELS: Final = ("debug", "info", "warning", "error")
MAX_PAYLOAD: Final = 3 << 20


class SettingsError(Exception):
    """A setting is wrong; the text says which and why."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Effective settings of one process that serves everything."""

    host: str
    port: int
    data_dir: Path
    token: str | None
    log_level: str
    log_format: str
    fast_lane: bool
    allowed_hosts: frozenset[str]
    allowed_origins: frozenset[str]
    max_payload: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ServeSettings":
        """Check ``values`` (names as on the command line, with underscores); SettingsError."""
        unknown = set(values) - _KNOWN
        if unknown:
            raise SettingsError(f"unknown setting: {', '.join(sorted(unknown))}")
        given = {name: value for name, value in values.items() if value is not None}
        host = str(given.get("host", "127.0.0.1"))
        token = _token(given)
        loopback = is_loopback(host)
        if not loopback and token is None:
            raise SettingsError(
                f"binding {host} needs a token (--token-file or CONTRAIL_TOKEN); "
                "without one the server binds loopback addresses only"
            )
        hosts = frozenset(given.get("allowed_hosts", ())) | {"localhost", "127.0.0.1", "::1"}
        return cls(
            host=host,
            port=_number(given, "port", DEFAULT_PORT, 0, 65_535),
            data_dir=Path(given.get("data_dir", "contrail-data")),
            token=token,
            log_level=_choice(given, "log_level", "info", _LEVELS),
            log_format=_choice(given, "log_format", "auto", ("auto", "json", "text")),
            fast_lane=_flag(given, "fast_lane", default=True),
            allowed_hosts=hosts if loopback else hosts | {host},
            allowed_origins=frozenset(given.get("allowed_origins", ())),
            max_payload=_number(given, "max_payload", 1 << 20, 1, MAX_PAYLOAD),
        )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _token(given: Mapping[str, Any]) -> str | None:
    path = given.get("token_file")
    if path is None:
        token = given.get("token")
    else:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SettingsError(f"the token file cannot be read: {error}") from error
    if token is not None and (not token or not str(token).isascii() or " " in str(token)):
        raise SettingsError("a token is a non-empty line of ASCII without spaces")
    return None if token is None else str(token)


def _number(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise SettingsError(f"{name} must be a whole number, not {value!r}") from None
    if not low <= number <= high:
        raise SettingsError(f"{name} must lie between {low} and {high}, not {number}")
    return number


def _flag(given: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = str(given.get(name, default)).lower()
    if value not in _FLAGS:
        raise SettingsError(f"{name} must be true or false, not {value}")
    return _FLAGS[value]


def _choice(given: Mapping[str, Any], name: str, default: str, choices: tuple[str, ...]) -> str:
    value = str(given.get(name, default)).lower()
    if value not in choices:
        raise SettingsError(f"{name} must be one of {', '.join(choices)}, not {value}")
    return value
