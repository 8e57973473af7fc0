"""Settings of the server: flags, then `CONTRAIL_*` variables, then a TOML file, then defaults.

Here they are only gathered; `contrail_serve` checks them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ENVIRONMENT_PREFIX: Final = "CONTRAIL_"

DEFAULTS: Final[Mapping[str, Any]] = {
    "host": "127.0.0.1",
    "port": 7420,
    "data_dir": "contrail-data",
    "token": None,
    "token_file": None,
    "log_level": "info",
    "log_format": "auto",
    "allowed_hosts": (),
    "allowed_origins": (),
    "max_payload": 1 << 20,
}
"""Every setting. `token` has no flag: a flag would show it to all processes of the machine."""

LISTS: Final = {"allowed_hosts", "allowed_origins"}
SECRET: Final = {"token"}


class SettingError(ValueError):
    """A settings file that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value and, for people, where it came from."""

    value: Any
    source: str


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None
) -> dict[str, Setting]:
    """The effective settings by name; `flags` holds None for what was not given.

    Raises SettingError for a file that cannot be read or names an unknown setting.
    """
    table = _read_table(config)
    return {
        name: _first_given(name, default, flags, environ, table, str(config))
        for name, default in DEFAULTS.items()
    }


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
        return Setting(flags[name], "flag")
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
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"{config}: {error}") from error
    unknown = sorted(set(table) - set(DEFAULTS))
    if unknown:
        raise SettingError(
            f"{config}: no setting is called {unknown[0]!r}; there are {', '.join(DEFAULTS)}"
        )
    return table
