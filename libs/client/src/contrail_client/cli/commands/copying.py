"""`contrail stream copy` and `consumer copy`: the configuration of one for another."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer

from contrail_client.cli import show
from contrail_client.cli.arguments import (
    ConsumerName,
    FieldsFile,
    SetFields,
    StreamName,
    fields_of,
    hint_at_edit,
)
from contrail_client.cli.commands import consumers, streams
from contrail_client.cli.connection import Session, client_command
from contrail_client.configs import ConsumerConfig, StreamConfig

NewName = Annotated[str, typer.Argument(help="Name of the copy.")]


def register() -> None:
    """Add the commands to the groups that they belong to."""
    client_command(streams.app, "copy")(copy_stream)
    client_command(consumers.app, "copy")(copy_consumer)


def copy_stream(
    session: Session,
    stream: StreamName,
    name: NewName,
    subjects: streams.Subjects = None,
    fields: FieldsFile = None,
    assignments: SetFields = None,
) -> None:
    """Create a stream with the configuration of another, without its messages.

    Two streams cannot capture the same subject, so the copy needs subjects of its own.
    """
    changes = fields_of(fields, assignments, subjects=subjects)
    source = session.client.get_stream(stream).config
    wanted = cast(StreamConfig, _copied(source, changes))
    with hint_at_edit("contrail stream edit"):
        made = session.client.create_stream(name, wanted)
    show.configuration(made, name, as_json=session.as_json)


def copy_consumer(
    session: Session,
    stream: StreamName,
    consumer: ConsumerName,
    name: NewName,
    filters: consumers.Filters = None,
    fields: FieldsFile = None,
    assignments: SetFields = None,
) -> None:
    """Create a consumer with the configuration of another, including where it starts."""
    changes = fields_of(fields, assignments, filter_subjects=filters)
    source = session.client.consumer(stream, consumer).info().config
    wanted = _copied(source, changes)
    if filters or "filter_subject" in changes:
        # One of the two says it all; the copy must not keep the other of its source.
        wanted.pop("filter_subject" if filters else "filter_subjects", None)
    with hint_at_edit("contrail consumer edit"):
        made = session.client.create_consumer(stream, name, cast(ConsumerConfig, wanted))
    show.configuration(made.info(), f"{stream} / {name}", as_json=session.as_json)


def _copied(source: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, without its name, with changes."""
    names = ("name", "durable_name")
    return {key: value for key, value in source.items() if key not in names} | dict(changes)
