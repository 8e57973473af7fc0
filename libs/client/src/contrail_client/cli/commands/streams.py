"""`contrail stream`: manage streams, and the messages in them."""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from contrail_client.cli import show, units
from contrail_client.cli.arguments import (
    FieldsFile,
    FromReplica,
    Raw,
    Replace,
    SetFields,
    StreamName,
    Yes,
    confirm,
    fields_of,
    hint_at_edit,
)
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.tree import group
from contrail_client.configs import StreamConfig
from contrail_client.models import Range

app = group("Manage streams.")

Subjects = Annotated[
    list[str] | None,
    typer.Option("--subject", metavar="SUBJECT", help="Subject to capture; may be repeated."),
]
Filter = Annotated[
    str | None, typer.Option("--subject", metavar="SUBJECT", help="Only matching subjects.")
]
MaxMsgs = Annotated[int | None, typer.Option(help="Maximum number of messages.")]
MaxBytes = Annotated[int | None, typer.Option(metavar="BYTES", help="Maximum size in bytes.")]
MaxAge = Annotated[
    str | None, typer.Option(metavar="DURATION", help='Maximum age of messages, such as "7d".')
]
MaxPerSubject = Annotated[int | None, typer.Option(help="Maximum number of messages per subject.")]
Discard = Annotated[
    str | None,
    typer.Option(
        metavar="old|new", help="Messages to discard when a limit is reached: old or new."
    ),
]
UpToSeq = Annotated[
    int | None, typer.Option(metavar="SEQ", help="As of this sequence (inclusive).")
]
UpToTime = Annotated[
    str | None, typer.Option(metavar="TIME", help="As of this time (RFC 3339, exclusive).")
]
Sequence = Annotated[int, typer.Argument(help="Sequence of the message.")]
Shard = Annotated[int | None, typer.Option(help="Shard, if the stream has several.")]
Shards = Annotated[int | None, typer.Option(help="Number of shards; cannot be changed later.")]
ShardBy = Annotated[
    list[int] | None,
    typer.Option(
        help="Position (from 1) of a subject token that selects the shard; may be repeated."
    ),
]
Page = Annotated[int, typer.Option(min=1, max=1_000, help="Number of messages per page.")]
FromSeq = Annotated[
    int | None, typer.Option("--from", metavar="SEQ", help="Start at this sequence.")
]
Since = Annotated[str | None, typer.Option(metavar="TIME", help="Start at this time (RFC 3339).")]

_CHUNK_BYTES: Final = 256 * 1024


@client_command(app, "ls")
def list_streams(session: Session, subject: Filter = None) -> None:
    """List streams."""
    now_ns = time.time_ns()
    show.listing(
        session.client.list_streams(subject=subject),
        ["stream", "subjects", "messages", "size", "first", "last", "last message", "consumers"],
        lambda info: (
            info.name,
            info.config.get("subjects", []),
            info.state.messages,
            units.size(info.state.bytes),
            info.state.first_seq,
            info.state.last_seq,
            units.age(info.state.last_ts, now_ns),
            info.state.consumer_count,
        ),
        as_json=session.as_json,
    )


@client_command(app, "info")
def show_stream(session: Session, stream: StreamName, consistency: FromReplica = None) -> None:
    """Show a stream's configuration and state."""
    info = session.client.get_stream(stream, consistency=consistency)
    show.facts(info, stream, as_json=session.as_json)


@client_command(app, "create")
def create_stream(
    session: Session,
    stream: StreamName,
    subjects: Subjects = None,
    max_msgs: MaxMsgs = None,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    max_msgs_per_subject: MaxPerSubject = None,
    discard: Discard = None,
    shards: Shards = None,
    shard_by: ShardBy = None,
    fields: FieldsFile = None,
    assignments: SetFields = None,
    replace: Replace = False,
) -> None:
    """Create a stream. An existing stream is not changed."""
    config = fields_of(
        fields,
        assignments,
        subjects=subjects,
        max_msgs=max_msgs,
        max_bytes=max_bytes,
        max_age=max_age,
        max_msgs_per_subject=max_msgs_per_subject,
        discard=discard,
        shards=shards,
        shard_by=shard_by,
    )
    wanted = cast(StreamConfig, config)  # the server checks it
    if replace:
        info = session.client.put_stream(stream, wanted)
    else:
        with hint_at_edit("contrail stream edit"):
            info = session.client.create_stream(stream, wanted)
    show.configuration(info, stream, as_json=session.as_json)


@client_command(app, "edit")
def edit_stream(
    session: Session,
    stream: StreamName,
    subjects: Subjects = None,
    max_msgs: MaxMsgs = None,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    max_msgs_per_subject: MaxPerSubject = None,
    discard: Discard = None,
    fields: FieldsFile = None,
    assignments: SetFields = None,
) -> None:
    """Change the given fields of a stream's configuration."""
    changes = fields_of(
        fields,
        assignments,
        subjects=subjects,
        max_msgs=max_msgs,
        max_bytes=max_bytes,
        max_age=max_age,
        max_msgs_per_subject=max_msgs_per_subject,
        discard=discard,
    )
    info = session.client.update_stream(stream, changes)
    show.configuration(info, stream, as_json=session.as_json)


@client_command(app, "rm")
def remove_stream(session: Session, stream: StreamName, yes: Yes = False) -> None:
    """Remove a stream with its messages and consumers."""
    state = session.client.get_stream(stream).state
    held = f"{units.counted(state.messages, 'message')} ({units.size(state.bytes)})"
    consumers = units.counted(state.consumer_count, "consumer")
    confirm(f"Remove stream {stream} with {held} and {consumers}?", yes)
    session.client.delete_stream(stream)
    show.done(
        f"{stream} removed, with {held} and {consumers}",
        {
            "removed": stream,
            "messages": state.messages,
            "bytes": state.bytes,
            "consumers": state.consumer_count,
        },
        as_json=session.as_json,
    )


@client_command(app, "purge")
def purge_stream(
    session: Session,
    stream: StreamName,
    subject: Filter = None,
    up_to_seq: Annotated[
        int | None, typer.Option(metavar="SEQ", help="Only messages below this sequence.")
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Number of newest messages to keep.")] = None,
    shard: Shard = None,
    yes: Yes = False,
) -> None:
    """Remove messages of a stream. Default: all messages."""
    confirm(f"Remove messages of stream {stream}?", yes)
    purged = session.client.purge_stream(
        stream, subject=subject, up_to_seq=up_to_seq, keep=keep, shard=shard
    )
    text = f"{units.counted(purged, 'message')} removed"
    show.done(text, {"purged": purged}, as_json=session.as_json)


@client_command(app, "erase")
def erase_messages(
    session: Session,
    stream: StreamName,
    seqs: Annotated[list[int] | None, typer.Argument(help="Sequences to erase.")] = None,
    subject: Filter = None,
    shard: Shard = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds to wait for completion.")
    ] = 30.0,
    yes: Yes = False,
) -> None:
    """Delete messages and remove their bytes from all files."""
    confirm(f"Erase messages of stream {stream}? This cannot be undone.", yes)
    receipt = session.client.erase(stream, seqs or None, subject=subject, shard=shard, wait_s=wait)
    show.facts(receipt, receipt.id, as_json=session.as_json)


def show_erasure(
    session: Session,
    erasure_id: Annotated[str, typer.Argument(help="Id of the receipt.")],
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds to wait for completion.")
    ] = 0.0,
) -> None:
    """Show the receipt of an erasure."""
    receipt = session.client.erasure(erasure_id, wait_s=wait)
    show.facts(receipt, receipt.id, as_json=session.as_json)


def register(outer: typer.Typer) -> None:
    """Add the commands that are not of a stream alone."""
    client_command(outer, "erasure")(show_erasure)


@client_command(app, "seal")
def seal_stream(session: Session, stream: StreamName, yes: Yes = False) -> None:
    """Make a stream read-only for good."""
    confirm(f"Seal stream {stream}? This cannot be undone.", yes)
    info = session.client.seal_stream(stream)
    show.configuration(info, stream, as_json=session.as_json)


@client_command(app, "stepdown")
def step_down(
    session: Session,
    stream: StreamName,
    preferred: Annotated[
        str | None, typer.Option(metavar="NODE", help="The node that should lead.")
    ] = None,
) -> None:
    """Make another node of the cluster the leader of a stream."""
    leader = session.client.step_down(stream, preferred=preferred)
    show.done(f"{leader} leads stream {stream}", {"leader": leader}, as_json=session.as_json)


@client_command(app, "snapshot")
def take_snapshot(
    session: Session,
    stream: StreamName,
    file: Annotated[Path, typer.Argument(help="File to write the archive to.", dir_okay=False)],
    consumers: Annotated[bool, typer.Option(help="Include the stream's consumers.")] = True,
) -> None:
    """Write an archive of a stream to a file. The file appears once it is complete."""
    special = file.exists() and not file.is_file()  # a device or a pipe: nothing takes its place
    part = file if special else file.with_name(f"{file.name}.part")
    size = 0
    try:
        with (
            part.open("wb") as target,
            show.progress("bytes", None, shown=not session.as_json) as bar,
        ):
            for chunk in session.client.snapshot(stream, consumers=consumers):
                target.write(chunk)
                size += len(chunk)
                bar.advance(bar.task_ids[0], len(chunk))
        if not special:
            part.replace(file)
    except OSError as error:
        error.filename = error.filename or str(part)
        raise
    finally:
        if not special:
            part.unlink(missing_ok=True)
    show.done(
        f"{units.size(size)} written to {file}",
        {"stream": stream, "file": str(file), "bytes": size},
        as_json=session.as_json,
    )


@client_command(app, "restore")
def restore_stream(
    session: Session,
    stream: StreamName,
    file: Annotated[
        Path,
        typer.Argument(help="Archive file to read.", exists=True, dir_okay=False, readable=True),
    ],
) -> None:
    """Create a stream from an archive, under the same or another name."""
    size = file.stat().st_size
    with file.open("rb") as source, show.progress("bytes", size, shown=not session.as_json) as bar:

        def chunks() -> Iterator[bytes]:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
                bar.advance(bar.task_ids[0], len(chunk))

        info = session.client.restore(stream, chunks())
    show.facts(info, stream, as_json=session.as_json)


@client_command(app, "subjects")
def list_subjects(
    session: Session,
    stream: StreamName,
    subject: Filter = None,
    consistency: FromReplica = None,
) -> None:
    """List subjects and their number of messages."""
    found = session.client.list_subjects(stream, subject=subject, consistency=consistency)
    show.listing(
        found,
        ["subject", "messages"],
        lambda each: (each.subject, each.messages),
        as_json=session.as_json,
    )


@client_command(app, "deleted")
def list_deleted(
    session: Session, stream: StreamName, shard: Shard = None, consistency: FromReplica = None
) -> None:
    """List ranges of deleted sequences."""
    found = session.client.list_deleted(stream, shard=shard, consistency=consistency)
    if session.as_json:
        for first, last in found:
            show.json_line({"first_seq": first, "last_seq": last})
    else:
        show.table(["first", "last"], found)


@client_command(app, "get")
def get_message(
    session: Session,
    stream: StreamName,
    seq: Sequence,
    shard: Shard = None,
    consistency: FromReplica = None,
    raw: Raw = False,
) -> None:
    """Print one message."""
    found = session.client.get_message(stream, seq, shard=shard, consistency=consistency)
    show.message(found, as_json=session.as_json, raw=raw)


@client_command(app, "last")
def last_messages(
    session: Session,
    stream: StreamName,
    subject: Filter = None,
    up_to_seq: UpToSeq = None,
    up_to_time: UpToTime = None,
    shard: Shard = None,
    consistency: FromReplica = None,
    raw: Raw = False,
) -> None:
    """Print the newest message of each subject."""
    for found in session.client.last_messages(
        stream,
        subject=subject,
        up_to_seq=up_to_seq,
        up_to_time=up_to_time,
        shard=shard,
        consistency=consistency,
    ):
        show.message(found, as_json=session.as_json, raw=raw)


@client_command(app, "delete-message")
def delete_message(
    session: Session, stream: StreamName, seq: Sequence, shard: Shard = None, yes: Yes = False
) -> None:
    """Delete one message."""
    confirm(f"Delete message {seq} of stream {stream}?", yes)
    session.client.delete_message(stream, seq, shard=shard)
    result = {"deleted": seq, "stream": stream}
    show.done(f"message {seq} of {stream} deleted", result, as_json=session.as_json)


@client_command(app, "view")
def view_stream(
    session: Session,
    stream: StreamName,
    subject: Filter = None,
    from_seq: FromSeq = None,
    since: Since = None,
    shard: Shard = None,
    consistency: FromReplica = None,
    page: Page = 25,
    raw: Raw = False,
) -> None:
    """Page through a stream's messages. Without a terminal, print the first page."""
    read = partial(
        session.client.read_range,
        stream,
        subject=subject,
        shard=shard,
        limit=page,
        consistency=consistency,
    )
    found = read(from_seq=from_seq, start_time=since)
    while True:
        for message in found.messages:
            show.message(message, as_json=session.as_json, raw=raw)
        if not found.num_pending or not _wants_more(found):
            return
        found = read(from_seq=found.cursor or found.next_seq)


def _wants_more(found: Range) -> bool:
    if not (sys.stdin.isatty() and show.errors.is_terminal):
        return False
    left = units.counted(found.num_pending, "message")
    show.errors.print(f"{left} left. Enter for more, q to quit: ", end="", markup=False)
    answer = sys.stdin.readline()
    return answer.endswith("\n") and answer.strip().lower() not in ("q", "quit")
