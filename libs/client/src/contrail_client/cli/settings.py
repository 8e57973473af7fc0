"""Settings of the server: flags, then `CONTRAIL_*` variables, then a TOML file, then defaults.

Here they are only gathered; `contrail_serve` checks them.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ENVIRONMENT_PREFIX: Final = "CONTRAIL_"

_COMMON: Final[Mapping[str, Any]] = {
    "node": "n1",
    "host": "127.0.0.1",
    "port": 7420,
    "token": None,
    "token_file": None,
    "log_level": "info",
    "log_format": "auto",
    "access_log": False,
    "allowed_hosts": (),
    "allowed_origins": (),
    "max_payload": 1 << 20,
    "publish_timeout": "30s",
}
_SECRETS: Final[Mapping[str, Any]] = {"cluster_secret": None, "cluster_secret_file": None}
_DATA: Final[Mapping[str, Any]] = {
    "data_dir": "contrail-data",
    "encryption_key": None,
    "encryption_key_file": None,
    "memory_max_bytes": None,
    "accept_data_loss": False,
    "max_clock_jump": "10m",
}
_LINK: Final[Mapping[str, Any]] = {"storage": ("127.0.0.1:7430",), **_SECRETS}

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "serve": {**_COMMON, **_DATA},
    "storage": {
        **_COMMON,
        "port": 7422,
        "link_port": 7430,
        **_DATA,
        **_SECRETS,
    },
    "api": {**_COMMON, "node": "api", **_LINK, "gateways": ("127.0.0.1:7421",)},
    "gateway": {**_COMMON, "node": "gateway", "port": 7421, **_LINK, "apis": ("127.0.0.1:7420",)},
}
"""Every setting of each server command. Secrets have no flag: all processes could see it."""

KNOWN: Final = frozenset(name for settings in DEFAULTS.values() for name in settings)
LISTS: Final = {"allowed_hosts", "allowed_origins", "storage", "gateways", "apis"}
SECRET: Final = {"token", "cluster_secret", "encryption_key"}

CLIENT: Final = "client"
"""A table of the same file, for the client commands."""


_OTHERS: Final = frozenset({"url", "token", "config", "context"})
"""Variables of the client commands."""


class SettingError(ValueError):
    """A settings file that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value and, for people, where it came from."""

    value: Any
    source: str


def read_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config: Path | None,
    service: str = "serve",
) -> dict[str, Setting]:
    """The effective settings of `service` by name; `flags` holds None for what was not given.

    A file may hold settings of other services, too, so that all share one. Raises SettingError for
    a file that cannot be read or names a setting that no service has.
    """
    table = _read_table(config)
    return {
        name: _first_given(name, default, flags, environ, table, str(config))
        for name, default in DEFAULTS[service].items()
    }


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of ours and is none."""
    known = {name.upper() for name in KNOWN | _OTHERS}
    ours = (each for each in sorted(environ) if each.startswith(ENVIRONMENT_PREFIX))
    rest = (each.removeprefix(ENVIRONMENT_PREFIX) for each in ours)
    return [
        f"{ENVIRONMENT_PREFIX}{name} is set, but is not a known setting"
        + did_you_mean(name, known, ENVIRONMENT_PREFIX)
        for name in rest
        if name not in known
    ]


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`, did you mean X?` for the nearest of the known names; empty when none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {prefix}{near[0]}?" if near else ""


def _first_given(
    name: str,
    default: Any,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    table: Mapping[str, Any],
    file: str,
) -> Setting:
    variable = ENVIRONMENT_PREFIX + name.upper()
    if flags.get(name) is not None:
        return Setting(_elements(flags[name]) if name in LISTS else flags[name], "flag")
    if variable in environ:
        text = environ[variable]
        return Setting(_elements(text) if name in LISTS else text, variable)
    if name in table:
        return Setting(table[name], file)
    return Setting(default, "default")


def _elements(text: str) -> tuple[str, ...]:
    return tuple(element.strip() for element in text.split(",") if element.strip())


def _read_table(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{config}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"{config}: {error}") from error
    table.pop(CLIENT, None)
    unknown = sorted(set(table) - KNOWN)
    if unknown:
        near = did_you_mean(unknown[0], KNOWN)
        listed = near or f"; settings are {', '.join(sorted(KNOWN))}"
        raise SettingError(f"{config}: unknown setting {unknown[0]!r}{listed}")
    return table
