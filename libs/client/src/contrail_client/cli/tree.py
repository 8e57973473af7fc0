"""The tree of commands: how they are declared, shown in `--help`, and run to their ends."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from contrail_client.cli import ending, show
from contrail_client.cli.settings import unknown_variables

JSON: Final = "--json"
_COMPLETING: Final = "_CONTRAIL_COMPLETE"
"""Set by a shell that completes a word; warnings would disturb the completion."""

_METAVARS: Final = {
    "str": "TEXT",
    "int": "NUMBER",
    "float": "NUMBER",
    "Path": "FILE",
    "path": "FILE",
    "file": "FILE",
}


class Command(TyperCommand):
    """A command whose help is shown as it is written: brackets are not read as markup."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _as_written(self)

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, which takes no value."""
        return _flag(super().get_help_option(ctx))


class CommandGroup(TyperGroup):
    """Several commands under one name."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _as_written(self)

    def get_help_option(self, ctx: Any) -> Any:
        """As `Command.get_help_option`."""
        return _flag(super().get_help_option(ctx))


class CommandLine(CommandGroup):
    """All commands: ends with a status and, when something went wrong, one line about it."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that `args` name; `--json` may stand before or after it."""
        given = list(sys.argv[1:] if args is None else args)
        as_json, given = _json_last(given)

        def run() -> int | None:
            _check_streams()
            if _COMPLETING not in os.environ:
                for warning in unknown_variables(os.environ):
                    show.warning(warning, as_json=as_json)
            status: int | None = super(CommandLine, self).main(
                given, prog_name, complete_var, False, windows_expand_args, **extra
            )
            return status

        if not standalone_mode:
            return run()
        sys.exit(ending.carry_out(run, as_json=as_json))


def group(text: str) -> typer.Typer:
    """A group of commands, to be added to another; `text` is its help."""
    return typer.Typer(cls=CommandGroup, help=text, no_args_is_help=True)


def _check_streams() -> None:
    """Replace a closed stdin or stderr; raise Failed if stdout is closed.

    Python has None for those, and the next socket would get the closed one's number.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - it stays open
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        raise ending.Failed("standard output is closed")


def _json_last(given: list[str]) -> tuple[bool, list[str]]:
    """Whether `--json` was given, and the arguments with it at the end, where commands take it."""
    end = given.index("--") if "--" in given else len(given)
    options, rest = given[:end], given[end:]
    if JSON not in options:
        return False, given
    return True, [*(each for each in options if each != JSON), JSON, *rest]


def _as_written(command: Any) -> None:
    """Keep brackets in help from being read as markup, and name values for people."""
    for text in ("help", "short_help"):
        if getattr(command, text, None):
            setattr(command, text, escape(getattr(command, text)))
    for parameter in command.params:
        if getattr(parameter, "help", None):
            parameter.help = escape(parameter.help)
        if parameter.metavar is None:
            parameter.metavar = _metavar(parameter)
        if isinstance(getattr(parameter, "show_default", None), str):
            # Typer puts a default that is given as a text in parentheses.
            parameter._get_default_string = partial(_shown_default, parameter)


def _shown_default(parameter: Any, **_: Any) -> str:
    return str(parameter.show_default)


def _flag(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


def _metavar(parameter: Any) -> str | None:
    if parameter.param_type_name == "argument":
        name = str(parameter.name).upper()
        parameter.display_type_rich = lambda ctx: ""  # the name already says it
        return f"{name}..." if parameter.nargs != 1 else name
    if getattr(parameter, "is_flag", False):
        return ""
    bare = getattr(parameter, "bare_type", None)  # older versions of Typer have their own names
    if bare is None:
        return None
    kind = str(bare()).removeprefix("list[").rstrip("]")
    return _METAVARS.get(kind)
