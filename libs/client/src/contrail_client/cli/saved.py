"""Contexts: servers saved under names, so that commands need no address.

A context is a JSON file in `contexts/` of the user's configuration folder. The file `context` next
to `contexts/` has the name of the selected one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from contrail_client.cli.ending import Failed

VARIABLE: Final = "CONTRAIL_CONTEXT"
"""Names the context to use instead of the selected one."""
_FOLDER_MODE: Final = 0o700
_FORBIDDEN: Final = frozenset("/\\\0")


class Saved(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A saved server. A token stays in its own file; only the file's path is saved."""

    url: str
    token_file: str = ""
    description: str = ""


def in_use(environ: Mapping[str, str]) -> Saved | None:
    """The context that the environment names, or else the selected one; None without either."""
    name = environ.get(VARIABLE) or selected_name(environ)
    return read(environ, name) if name else None


def selected_name(environ: Mapping[str, str]) -> str:
    """The name of the selected context, empty without one."""
    try:
        return (_folder(environ) / "context").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def names(environ: Mapping[str, str]) -> list[str]:
    """The names of all contexts, in order."""
    return sorted(path.stem for path in (_folder(environ) / "contexts").glob("*.json"))


def read(environ: Mapping[str, str], name: str) -> Saved:
    """A context by its name; Failed if there is none, ValueError for an impossible name."""
    path = _path(environ, name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Saved)
    except FileNotFoundError:
        raise Failed(
            f"context {name} does not exist; create it with `contrail context add`, or use "
            "`contrail context unselect` to select none"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise Failed(f"{path}: {error}") from error


def save(environ: Mapping[str, str], name: str, context: Saved) -> None:
    """Save a context, replacing any of that name."""
    path = _path(environ, name)
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    _replace(path, msgspec.json.format(msgspec.json.encode(context)) + b"\n")


def select(environ: Mapping[str, str], name: str) -> None:
    """Use this context from now on."""
    _replace(_folder(environ) / "context", f"{name}\n".encode())


def unselect(environ: Mapping[str, str]) -> None:
    """Use no context from now on."""
    (_folder(environ) / "context").unlink(missing_ok=True)


def remove(environ: Mapping[str, str], name: str) -> None:
    """Remove a context, and unselect it if it is selected."""
    _path(environ, name).unlink()
    if selected_name(environ) == name:
        unselect(environ)


def _folder(environ: Mapping[str, str]) -> Path:
    # The place that the XDG Base Directory Specification defines.
    base = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "contrail"


def _path(environ: Mapping[str, str], name: str) -> Path:
    # A leading dot is that of a draft, see `_replace`.
    if not name or name.startswith(".") or not _FORBIDDEN.isdisjoint(name):
        raise ValueError(f"{name!r} is not a valid context name")
    return _folder(environ) / "contexts" / f"{name}.json"


def _replace(path: Path, content: bytes) -> None:
    # Write and rename, so that another command never reads half a file.
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(content)
    draft.replace(path)
