"""A consumer's configuration in JSON, in requests and in answers, and its conversion."""

from typing import Any, Final, Literal, cast

import msgspec
from pydantic import ConfigDict, Field

from contrail_api.fields import (
    DurationNs,
    Int64,
    Metadata,
    Name,
    RequestModel,
    TimeNs,
    Unavailable,
    stands_at_default,
    unavailable,
    unavailable_fields,
)
from contrail_common import errors
from contrail_common.config_rules import ConsumerDraft
from contrail_common.model import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    DeliverPolicy,
    SequencePair,
)
from contrail_common.timeunits import format_duration, format_time
from contrail_edge.http.problems import invalid_field
from contrail_edge.inputs import schema_marks as marks
from contrail_edge.inputs.schema_marks import DurationText, TimeText


class ConsumerConfigBody(RequestModel):
    """A consumer's configuration. Omitted fields take their defaults."""

    model_config = ConfigDict(
        title="ConsumerConfigBody",
        json_schema_extra={
            "examples": [{"filter_subject": "orders.eu.*", "ack_wait": "30s", "max_deliver": 5}]
        },
    )

    name: Name = Field(
        default="", description="Name of the consumer. With PUT it comes from the path."
    )
    durable_name: str | None = Field(
        default=None,
        description="Same as `name`, for JetStream compatibility. An explicit null creates an "
        "ephemeral consumer.",
    )
    description: str = ""
    """Text of your own."""
    deliver_policy: Literal[
        "all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"
    ] = Field(
        default="all",
        description="Where delivery starts. `last_per_subject` requires a filter that matches at "
        "most 100,000 subjects.",
    )
    opt_start_seq: Int64 = Field(default=0, ge=0)
    """Sequence to start from, with `by_start_sequence`."""
    opt_start_time: TimeNs | None = None
    """Time to start from, with `by_start_time`."""
    ack_policy: Literal["none", "all", "explicit"] = "explicit"
    """What an acknowledgement covers. `explicit`: one message. `all`: also all earlier messages.
    `none`: messages need no acknowledgement. Cannot be changed."""
    ack_wait: DurationNs = Field(
        default=0,
        description="How long to wait for an acknowledgement before redelivery. 0 means the "
        "default, 30s.",
    )
    max_deliver: Int64 = -1
    """Maximum number of deliveries of a message; -1 means no limit."""
    backoff: list[DurationNs] = Field(default_factory=list)
    """Time until each redelivery of a message, instead of `ack_wait`. The last one applies to all
    further redeliveries."""
    filter_subject: str | None = None
    """Filter: only messages with matching subjects are delivered."""
    filter_subjects: list[str] = Field(default_factory=list)
    """Several filters, which must not overlap, instead of `filter_subject`."""
    replay_policy: Unavailable[Literal["instant", "original"]] = "instant"
    rate_limit_bps: Unavailable[Int64] = 0
    sample_freq: Unavailable[str] = ""
    max_waiting: Int64 = Field(
        default=0, description="Maximum number of waiting pulls. 0 means the default, 512."
    )
    max_ack_pending: Int64 = Field(
        default=0,
        description="Maximum number of deliveries awaiting acknowledgement. 0 means the stream's "
        "default, or 1000 if it has none.",
    )
    headers_only: bool = False
    """Deliver headers without payloads. The size of the payload is in Nats-Msg-Size."""
    max_batch: Int64 = 0
    """Maximum `batch` of a pull; 0 means no limit."""
    max_expires: DurationNs = 0
    """Maximum `expires` of a pull; 0s means no limit."""
    max_bytes: Int64 = 0
    """Maximum `max_bytes` of a pull; 0 means no limit."""
    inactive_threshold: DurationNs = Field(
        default=0,
        description="The consumer is deleted after being unused for this long. 0 means the "
        "stream's default; if it has none, ephemeral consumers get 5s and durable ones "
        "are kept.",
    )
    num_replicas: Int64 = Field(
        default=0, description="Either 0 or the stream's number of replicas."
    )
    mem_storage: bool = Field(
        default=False,
        description="Accepted and returned for JetStream compatibility, but has no effect: a "
        "consumer uses the storage of its stream. Cannot be changed.",
    )
    pause_until: Unavailable[TimeNs | None] = None
    priority_groups: Unavailable[list[str] | None] = None
    priority_policy: Unavailable[Literal["none", "overflow", "pinned_client", "prioritized"]] = (
        "none"
    )
    metadata: Metadata = Field(default_factory=dict)
    """Names and values of your own."""
    dead_letter: Unavailable[dict[str, Any] | None] = None
    ordered_by: Unavailable[str | Int64 | None] = None
    replay_speed: Unavailable[str | Int64 | None] = None


_DRAFT_KEYS: Final = {
    **{
        name: name
        for name in ConsumerDraft.__annotations__
        # Two fields of the body give the filters: see `_filters`.
        if name in ConsumerConfigBody.model_fields and name != "filter_subjects"
    },
    "opt_start_time": "opt_start_time_ns",
    "ack_wait": "ack_wait_ns",
    "backoff": "backoff_ns",
    "max_expires": "max_expires_ns",
    "inactive_threshold": "inactive_threshold_ns",
}
_ONLY_DEFAULT: Final = unavailable_fields(ConsumerConfigBody)


def consumer_draft(body: ConsumerConfigBody, *, durable: bool) -> ConsumerDraft:
    """Return the fields that ``body`` sets.

    Raises CONSUMER_CONFIG_INVALID for an unavailable field that does not have its default,
    FILTER_TWICE and FILTER_EMPTY.
    """
    for name in _ONLY_DEFAULT:
        if not stands_at_default(body, name):
            raise unavailable(errors.CONSUMER_CONFIG_INVALID, name)
    draft = {
        _DRAFT_KEYS[name]: getattr(body, name)
        for name in body.model_fields_set
        if name in _DRAFT_KEYS
    }
    draft["backoff_ns"] = tuple(body.backoff)
    draft["opt_start_time_ns"] = body.opt_start_time or 0
    draft["filter_subjects"] = _filters(body)
    draft["durable"] = durable
    return cast(ConsumerDraft, draft)


def _filters(body: ConsumerConfigBody) -> tuple[str, ...]:
    if not body.filter_subject:
        return tuple(body.filter_subjects)
    # An answer has a single filter in both fields, and may be sent back.
    if body.filter_subjects and body.filter_subjects != [body.filter_subject]:
        raise invalid_field(
            "/filter_subjects", "cannot be used together with filter_subject", errors.FILTER_TWICE
        )
    return (body.filter_subject,)


class ConsumerConfigJson(msgspec.Struct, kw_only=True):
    """A consumer's complete configuration."""

    name: str
    durable_name: str | None
    description: str
    deliver_policy: DeliverPolicy
    opt_start_seq: int
    opt_start_time: TimeText | None
    ack_policy: AckPolicy
    ack_wait: DurationText
    max_deliver: int
    backoff: list[DurationText]
    filter_subject: str | None
    filter_subjects: tuple[str, ...]
    replay_policy: marks.Unavailable[str]
    rate_limit_bps: marks.Unavailable[int]
    sample_freq: marks.Unavailable[str]
    max_waiting: int
    max_ack_pending: int
    headers_only: bool
    max_batch: int
    max_expires: DurationText
    max_bytes: int
    inactive_threshold: DurationText
    num_replicas: int
    mem_storage: bool
    pause_until: marks.Unavailable[str | None]
    priority_groups: marks.Unavailable[list[str]]
    priority_policy: marks.Unavailable[str]
    metadata: dict[str, str]
    dead_letter: marks.Unavailable[dict[str, Any] | None]
    ordered_by: marks.Unavailable[str | int | None]
    replay_speed: marks.Unavailable[str | int | None]


class SequencePairJson(msgspec.Struct):
    """A position as consumer sequence and stream sequence, and the time it last advanced."""

    consumer_seq: int
    """Sequence of the delivery."""
    stream_seq: int
    """Sequence of the message."""
    last_active: TimeText | None
    """Time of the last change; null if there was none."""


class ConsumerShardJson(msgspec.Struct, kw_only=True):
    """Progress of a consumer in one shard of its stream."""

    shard: int
    """Number of the shard."""
    delivered: SequencePairJson
    """Last delivery."""
    ack_floor: SequencePairJson
    """Highest position up to which nothing is left to acknowledge."""
    num_ack_pending: int
    """Number of delivered messages that are not acknowledged yet."""
    num_redelivered: int
    """Number of messages awaiting acknowledgement that were delivered more than once."""
    num_pending: int
    """Number of matching messages that are not delivered yet."""


class ConsumerInfoJson(msgspec.Struct, kw_only=True):
    """A consumer's configuration and progress.

    For a stream with several shards, ``shards`` gives the progress in each shard. The other counts
    and consumer sequences are then sums over all shards, and stream sequences are the highest of
    any shard. ``push_bound`` is true while a WebSocket subscription is using the consumer.
    """

    stream: str
    """Name of the stream."""
    name: str
    """Name of the consumer."""
    created: TimeText
    """Time at which the consumer was created."""
    config: ConsumerConfigJson
    """The complete configuration."""
    delivered: SequencePairJson
    """Last delivery."""
    ack_floor: SequencePairJson
    """Highest position up to which nothing is left to acknowledge."""
    num_ack_pending: int
    """Number of delivered messages that are not acknowledged yet."""
    num_redelivered: int
    """Number of messages awaiting acknowledgement that were delivered more than once."""
    num_waiting: int
    """Number of waiting pulls."""
    num_pending: int
    """Number of matching messages that are not delivered yet."""
    push_bound: bool
    """True while a WebSocket subscription uses the consumer."""
    paused: marks.Unavailable[bool]
    shards: list[ConsumerShardJson] | msgspec.UnsetType = msgspec.UNSET
    """Progress in each shard, if the stream has several."""


class ConsumerPage(msgspec.Struct):
    """One page of consumers."""

    items: list[ConsumerInfoJson]
    """The consumers, by name."""
    next_page_token: str | None
    """Token of the next page; null on the last page."""


def config_json(config: ConsumerConfig) -> ConsumerConfigJson:
    """Return the configuration for answers. Sent back in a PUT, it changes nothing."""
    return ConsumerConfigJson(
        name=config.name,
        durable_name=config.name if config.durable else None,
        description=config.description,
        deliver_policy=config.deliver_policy,
        opt_start_seq=config.opt_start_seq,
        opt_start_time=format_time(config.opt_start_time_ns) if config.opt_start_time_ns else None,
        ack_policy=config.ack_policy,
        ack_wait=format_duration(config.ack_wait_ns),
        max_deliver=config.max_deliver,
        backoff=[format_duration(delay_ns) for delay_ns in config.backoff_ns],
        filter_subject=config.filter_subjects[0] if len(config.filter_subjects) == 1 else None,
        filter_subjects=config.filter_subjects,
        # Fields of missing features are shown with their defaults, so that a client can send the
        # configuration back.
        replay_policy="instant",
        rate_limit_bps=0,
        sample_freq="",
        max_waiting=config.max_waiting,
        # Without acknowledgements it has no meaning, and would be refused when it is sent back.
        max_ack_pending=0 if _is_unused(config) else config.max_ack_pending,
        headers_only=config.headers_only,
        max_batch=config.max_batch,
        max_expires=format_duration(config.max_expires_ns),
        max_bytes=config.max_bytes,
        inactive_threshold=format_duration(config.inactive_threshold_ns),
        num_replicas=config.num_replicas,
        mem_storage=config.mem_storage,
        pause_until=None,
        priority_groups=[],
        priority_policy="none",
        metadata=config.metadata,
        dead_letter=None,
        ordered_by=None,
        replay_speed=None,
    )


def _is_unused(config: ConsumerConfig) -> bool:
    return config.ack_policy == "none" and config.max_ack_pending > 0


def info_json(info: ConsumerInfo) -> ConsumerInfoJson:
    """Return a consumer for answers."""
    return ConsumerInfoJson(
        stream=info.stream,
        name=info.config.name,
        created=format_time(info.created_ns),
        config=config_json(info.config),
        delivered=_pair_json(info.delivered),
        ack_floor=_pair_json(info.ack_floor),
        num_ack_pending=info.num_ack_pending,
        num_redelivered=info.num_redelivered,
        num_waiting=info.num_waiting,
        num_pending=info.num_pending,
        push_bound=info.push_bound,
        paused=False,
        shards=[
            ConsumerShardJson(
                shard=one.shard,
                delivered=_pair_json(one.delivered),
                ack_floor=_pair_json(one.ack_floor),
                num_ack_pending=one.num_ack_pending,
                num_redelivered=one.num_redelivered,
                num_pending=one.num_pending,
            )
            for one in info.shards
        ]
        or msgspec.UNSET,
    )


def _pair_json(pair: SequencePair) -> SequencePairJson:
    last_active = format_time(pair.last_active_ns) if pair.last_active_ns else None
    return SequencePairJson(pair.consumer_seq, pair.stream_seq, last_active)
