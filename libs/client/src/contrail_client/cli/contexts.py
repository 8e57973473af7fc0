"""`contrail context`: servers by name, so that an address need not be given with each command.

A context is a JSON file in `contexts/` of the user's configuration folder; the file `context`
beside that folder holds the name of the one that is selected.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from contrail_client.cli import show
from contrail_client.cli.ending import Failed
from contrail_client.cli.tree import JSON, Command, group

VARIABLE: Final = "CONTRAIL_CONTEXT"
"""Names the context to use instead of the selected one."""
_FOLDER_MODE: Final = 0o700
_FORBIDDEN: Final = frozenset("/\\\0")

app = group("Manage contexts (named servers).")

Name = Annotated[str, typer.Argument(help="Name of the context.")]
AsJson = Annotated[
    bool, typer.Option(JSON, help="Print JSON, one value per line, also for errors.")
]


class Saved(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is saved of a server. Tokens stay in files of their own."""

    url: str
    token_file: str = ""
    description: str = ""


def folder(environ: Mapping[str, str]) -> Path:
    """The user's configuration folder of Contrail."""
    base = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "contrail"


def in_use(environ: Mapping[str, str]) -> Saved | None:
    """The context that the environment names, or else the selected one; ValueError."""
    named = environ.get(VARIABLE)
    if named:
        return _read(environ, named)
    selected = selected_name(environ)
    return _read(environ, selected) if selected else None


def selected_name(environ: Mapping[str, str]) -> str:
    """The name of the selected context, empty without one."""
    try:
        return (folder(environ) / "context").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@app.command("add", cls=Command)
def add(
    name: Name,
    server: Annotated[str, typer.Option("--server", metavar="URL", help="Server URL.")],
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File that contains the token.")
    ] = None,
    description: Annotated[
        str, typer.Option(help="Description of the context.", show_default=False)
    ] = "",
    select: Annotated[bool, typer.Option("--select", help="Select the new context.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save a server under a name, replacing any context of that name."""
    saved = Saved(server, str(token_file.absolute()) if token_file else "", description)
    path = _path(os.environ, name)
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    _replace(path, msgspec.json.format(msgspec.json.encode(saved)) + b"\n")
    if select:
        _select(name)
    show.done(
        f"context {name} saved", {"name": name, **msgspec.to_builtins(saved)}, as_json=as_json
    )


@app.command("ls", cls=Command)
def list_contexts(as_json: AsJson = False) -> None:
    """List contexts and mark the selected one."""
    selected = selected_name(os.environ)
    names = sorted(path.stem for path in (folder(os.environ) / "contexts").glob("*.json"))
    rows = [(name, _read(os.environ, name)) for name in names]
    if as_json:
        for name, saved in rows:
            facts = {"name": name, "selected": name == selected, **msgspec.to_builtins(saved)}
            show.json_line(facts)
        return
    show.table(
        ["", "context", "server", "token file", "description"],
        [
            ("*" if name == selected else " ", name, saved.url, saved.token_file, saved.description)
            for name, saved in rows
        ],
    )


@app.command("select", cls=Command)
def select_context(name: Name, as_json: AsJson = False) -> None:
    """Select the context to use from now on."""
    _read(os.environ, name)
    _select(name)
    show.done(f"context {name} selected", {"selected": name}, as_json=as_json)


@app.command("unselect", cls=Command)
def unselect(as_json: AsJson = False) -> None:
    """Stop using a context."""
    (folder(os.environ) / "context").unlink(missing_ok=True)
    show.done("no context selected", {"selected": None}, as_json=as_json)


@app.command("rm", cls=Command)
def remove(name: Name, as_json: AsJson = False) -> None:
    """Remove a context. This does not affect the server."""
    _read(os.environ, name)
    _path(os.environ, name).unlink()
    if selected_name(os.environ) == name:
        (folder(os.environ) / "context").unlink(missing_ok=True)
    show.done(f"context {name} removed", {"removed": name}, as_json=as_json)


def _path(environ: Mapping[str, str], name: str) -> Path:
    if not name or name.startswith(".") or not _FORBIDDEN.isdisjoint(name):
        raise ValueError(f"{name!r} is not a valid context name")
    return folder(environ) / "contexts" / f"{name}.json"


def _read(environ: Mapping[str, str], name: str) -> Saved:
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


def _select(name: str) -> None:
    _replace(folder(os.environ) / "context", f"{name}\n".encode())


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(content)
    draft.replace(path)
