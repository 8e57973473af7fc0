"""Commands on consumers, their deliveries and acknowledgements."""

from dataclasses import asdict
from functools import partial

from contrail_common.model import AckKind
from contrail_link.contract.consume import AckItem, PullRequest, PullResult
from tests.scenarios import showing
from tests.scenarios.arguments import ArgumentError, Arguments
from tests.scenarios.configuring import new_consumer, patched_consumer
from tests.scenarios.world import Delivered, World


async def create_consumer(world: World, arguments: Arguments) -> list[str]:
    """Create a consumer: ``consumer create STREAM NAME [ephemeral=yes] field=value...``."""
    stream, name = arguments.word("stream"), arguments.word("consumer")
    durable = not arguments.flag("ephemeral")
    config = new_consumer(name, arguments.fields(), durable=durable)
    arguments.end()
    put = world.link.put_consumer(stream, config, "create", None, False)
    _, created = await world.finish(put)
    return ["created" if created else "unchanged"]


async def update_consumer(world: World, arguments: Arguments) -> list[str]:
    """Change these fields alone: ``consumer update STREAM NAME field=value...``."""
    stream, name = arguments.word("stream"), arguments.word("consumer")
    fields = arguments.fields()
    arguments.end()
    current = await world.finish(world.link.consumer_info(stream, name))
    config = patched_consumer(current.config, fields)
    put = world.link.put_consumer(stream, config, "put", current.version, False)
    await world.finish(put)
    return ["updated"]


async def delete_consumer(world: World, arguments: Arguments) -> list[str]:
    """Remove a consumer: ``consumer delete STREAM NAME``."""
    stream, name = arguments.word("stream"), arguments.word("consumer")
    arguments.end()
    await world.finish(world.link.delete_consumer(stream, name))
    return []


async def consumer_info(world: World, arguments: Arguments) -> list[str]:
    """Tell how far a consumer is: ``consumer info STREAM NAME``."""
    stream, name = arguments.word("stream"), arguments.word("consumer")
    arguments.end()
    return showing.consumer_info(await world.finish(world.link.consumer_info(stream, name)))


async def consumer_pending(world: World, arguments: Arguments) -> list[str]:
    """Tell what is delivered and not acknowledged: ``consumer pending STREAM NAME``."""
    stream, name = arguments.word("stream"), arguments.word("consumer")
    arguments.end()
    await world.finish(world.link.consumer_info(stream, name))
    consumer = world.node.streams.shard(stream).machine.consumer(name)
    assert consumer is not None
    return showing.pending(consumer)


async def pull(world: World, arguments: Arguments) -> list[str]:
    """Pull: ``pull STREAM NAME [batch=N] [max_bytes=N] [expires=D]``.

    It waits only with ``expires``; how it ends then stands below the command that ends it.
    """
    stream, name = arguments.word("stream"), arguments.word("consumer")
    expires_ns = arguments.duration_option_ns("expires")
    request = PullRequest(
        stream=stream,
        consumer=name,
        batch=arguments.integer_option("batch", 1),
        max_bytes=arguments.integer_option("max_bytes"),
        expires_ns=expires_ns,
        no_wait=not expires_ns,
    )
    arguments.end()
    result = await world.pull(_pull_and_record(world, request))
    return [f"pull {result} waits"] if isinstance(result, int) else showing.pulled(result)


async def _pull_and_record(world: World, request: PullRequest) -> PullResult:
    result = await world.link.pull(request)
    address = Delivered(result.shard_id, result.consumer_id, result.epoch)
    for delivery in result.deliveries:
        world.delivered[request.stream, request.consumer, delivery.message.seq] = address
    # Deliveries are joined for some milliseconds before they are logged; asking for the state has
    # them logged at once, so that their deadlines count from the moment of the pull.
    await world.link.consumer_info(request.stream, request.consumer)
    return result


async def acknowledge(kind: AckKind, world: World, arguments: Arguments) -> list[str]:
    """Answer deliveries, with the tokens they last came with: ``ack STREAM NAME SEQ...``.

    Likewise ``nak`` (with ``delay=D``), ``term`` and ``in_progress``.
    """
    stream, name = arguments.word("stream"), arguments.word("consumer")
    delay_ns = arguments.duration_option_ns("delay") if kind == "nak" else 0
    seqs = arguments.integers("seq")
    arguments.end()
    items = [
        AckItem(
            **asdict(_address(world, stream, name, seq)), seqs=[seq], kind=kind, delay_ns=delay_ns
        )
        for seq in seqs
    ]
    results = await world.finish(world.link.acknowledge(stream, name, items, sync=True))
    return showing.acknowledged(seqs, results)


def _address(world: World, stream: str, name: str, seq: int) -> Delivered:
    try:
        return world.delivered[stream, name, seq]
    except KeyError:
        raise ArgumentError(f"{name} was never delivered seq {seq}") from None


ack = partial(acknowledge, "ack")
nak = partial(acknowledge, "nak")
term = partial(acknowledge, "term")
in_progress = partial(acknowledge, "in_progress")
