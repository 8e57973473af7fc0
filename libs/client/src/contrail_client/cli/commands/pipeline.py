"""`contrail pipeline`: jobs that run with Spark, which another package has."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import typer

from contrail_client.cli.ending import Failed
from contrail_client.cli.tree import CommandGroup

_PACKAGE: Final = "contrail_pipeline"


class _Jobs(CommandGroup):
    """The commands of the other package, which is imported only when one of them is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the jobs."""
        return list(_jobs().list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a job; None if there is none of that name."""
        return _jobs().get_command(ctx, cmd_name)


def _jobs() -> Any:
    if find_spec(_PACKAGE) is None:
        raise Failed(
            "contrail pipeline needs Spark: install the package contrail-spark[pipeline] as well"
        )
    return typer.main.get_group(import_module(f"{_PACKAGE}.commands").app)


app = typer.Typer(
    cls=_Jobs, help="Jobs on whole streams, which run with Spark.", no_args_is_help=True
)
app.callback()(lambda: None)  # Typer makes a group of an app without commands only with this
