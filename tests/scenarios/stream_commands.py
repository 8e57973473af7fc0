"""Commands that make and change streams, and put messages into them or take them out."""

from contrail_common.errors import ApiError
from contrail_common.model import PAYLOAD_BYTES_MAX, PublishMessage, StreamConfig
from contrail_edge.inputs.message_items import checked
from contrail_link import publishing
from tests.scenarios import showing
from tests.scenarios.arguments import ArgumentError, Arguments
from tests.scenarios.configuring import new_stream, patched_stream
from tests.scenarios.world import World


async def create_stream(world: World, arguments: Arguments) -> list[str]:
    """Create a stream: ``stream create NAME field=value...``."""
    config = new_stream(arguments.word("stream"), arguments.fields())
    arguments.end()
    _, created = await world.finish(world.link.put_stream(config, "create", None, False))
    return ["created" if created else "unchanged"]


async def update_stream(world: World, arguments: Arguments) -> list[str]:
    """Change these fields alone: ``stream update NAME field=value...``."""
    name, fields = arguments.word("stream"), arguments.fields()
    arguments.end()
    current = await world.finish(world.link.stream_info(name))
    config: StreamConfig = patched_stream(current.config, fields)
    await world.finish(world.link.put_stream(config, "put", current.version, False))
    return ["updated"]


async def delete_stream(world: World, arguments: Arguments) -> list[str]:
    """Remove a stream: ``stream delete NAME``."""
    name = arguments.word("stream")
    arguments.end()
    await world.finish(world.link.delete_stream(name))
    return []


async def stream_info(world: World, arguments: Arguments) -> list[str]:
    """Tell what a stream holds: ``stream info NAME``."""
    name = arguments.word("stream")
    arguments.end()
    return showing.stream_info(await world.finish(world.link.stream_info(name)))


async def purge_stream(world: World, arguments: Arguments) -> list[str]:
    """Remove messages: ``stream purge NAME [subject=FILTER] [up_to_seq=N] [keep=N]``."""
    name, subject = arguments.word("stream"), arguments.option("subject")
    up_to_seq, keep = arguments.integer_option("up_to_seq"), arguments.integer_option("keep")
    arguments.end()
    purged = await world.finish(world.link.purge_stream(name, subject, up_to_seq, keep))
    return [f"purged {purged}"]


async def publish(world: World, arguments: Arguments) -> list[str]:
    """Publish: ``publish SUBJECT [PAYLOAD] [count=N] [size=N] [stream=NAME] [Header=value...]``.

    ``count`` makes one request of so many messages, whose payloads are numbered; ``size`` makes a
    payload of so many bytes. Without ``stream`` the subject decides which one takes it.
    """
    subject, text = arguments.word("subject"), arguments.word("payload", "")
    count, size = arguments.integer_option("count", 1), arguments.integer_option("size")
    stream, headers = arguments.option("stream"), arguments.headers()
    arguments.end()
    if count < 1:
        raise ArgumentError("count is at least 1")
    if size and text:
        raise ArgumentError("a payload is given by its text or by its size")
    texts = [text] if count == 1 else [f"{text}{at}" for at in range(1, count + 1)]
    payloads = [b"x" * size if size else text.encode() for text in texts]
    messages = [_message(subject, headers, payload) for payload in payloads]
    ack = await world.finish(publishing.publish(world.link, stream, messages))
    return showing.published(ack.results)


def _message(subject: str, headers: dict[str, list[str]], payload: bytes) -> PublishMessage:
    found = checked(PublishMessage(subject, headers or None, payload), PAYLOAD_BYTES_MAX)
    if isinstance(found, ApiError):
        raise found
    return found


async def delete_message(world: World, arguments: Arguments) -> list[str]:
    """Remove one message: ``delete STREAM SEQ``."""
    name, seq = arguments.word("stream"), arguments.integer("seq")
    arguments.end()
    await world.finish(world.link.delete_message(name, seq))
    return []


async def erase(world: World, arguments: Arguments) -> list[str]:
    """Erase messages, and see it through: ``erase STREAM SEQ...`` or ``erase STREAM subject=S``."""
    name, subject = arguments.word("stream"), arguments.option("subject")
    seqs = [] if subject else arguments.integers("sequence")
    arguments.end()
    receipt = await world.finish(world.link.erase(name, seqs, subject))
    ended = await world.finish(world.link.erasure(receipt.erasure_id, 0))
    shredded = ", shredded" if ended.shredded else ""
    return [f"erased {ended.messages}, {ended.status}{shredded}"]
