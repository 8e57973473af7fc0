"""A configuration that is sent back as it was answered is the same one."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contrail_api.changes import as_document
from contrail_api.consumers import config as consumer_config
from contrail_api.consumers.routes import _is_ephemeral
from contrail_api.streams import config as stream_config
from contrail_api.streams import shown as stream_shown
from contrail_common import model
from contrail_common.config_rules import (
    ConsumerDraft,
    StreamDraft,
    complete_consumer,
    normalise_consumer,
    normalise_stream,
)
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, ConsumerLimits, StreamConfig
from tests.support.each import each

S = 1_000_000_000
MS = 1_000_000
limits = st.sampled_from([-1, 0, 1, 1_000])
flags = st.booleans()
metadata = st.dictionaries(
    st.sampled_from(["k", "_nats.ver", "_nats.level", "_nats.req.level"]), st.text(max_size=4)
)

STREAM: dict[str, st.SearchStrategy[Any]] = {
    "description": st.text(max_size=4),
    "subjects": st.sampled_from([(), ("a", "b.>")]),
    "retention": st.sampled_from(["limits", "interest", "workqueue"]),
    "storage": st.sampled_from(["file", "memory"]),
    "discard": st.sampled_from(["old", "new"]),
    "max_msgs": limits,
    "max_bytes": limits,
    "max_age_ns": st.sampled_from([0, 100 * MS, 90 * S]),
    "max_msgs_per_subject": limits,
    "discard_new_per_subject": flags,
    "max_msg_size": limits,
    "max_consumers": limits,
    "duplicate_window_ns": st.sampled_from([0, 100 * MS, 60 * S]),
    "num_replicas": st.sampled_from([0, 1]),
    "allow_direct": flags,
    "sealed": flags,
    "deny_delete": flags,
    "deny_purge": flags,
    "allow_rollup_hdrs": flags,
    "allow_atomic": flags,
    "allow_msg_ttl": flags,
    "subject_delete_marker_ttl_ns": st.sampled_from([0, S]),
    "compression": st.sampled_from(["none", "lz4", "zstd", "s2"]),
    "first_seq": st.sampled_from([0, 1, 7]),
    "consumer_limits": st.sampled_from(
        [ConsumerLimits(), ConsumerLimits(inactive_threshold_ns=S, max_ack_pending=5)]
    ),
    "metadata": metadata,
    "encrypted": flags,
    "shards": st.sampled_from([1, 4]),
    "shard_by": st.sampled_from([(), (1, 2)]),
    "erasure": st.sampled_from(["rewrite", "subject_key"]),
}
CONSUMER: dict[str, st.SearchStrategy[Any]] = {
    "description": st.text(max_size=4),
    "deliver_policy": st.sampled_from(["all", "last", "new", "last_per_subject"]),
    "ack_policy": st.sampled_from(["none", "all", "explicit"]),
    "ack_wait_ns": st.sampled_from([0, S]),
    "max_deliver": limits,
    "backoff_ns": st.sampled_from([(), (S, 5 * S)]),
    "filter_subjects": st.sampled_from([(), ("a",), ("a", "b.*")]),
    "max_waiting": st.sampled_from([0, 7]),
    "max_ack_pending": st.sampled_from([-1, 0, 5]),
    "max_batch": st.sampled_from([0, 7]),
    "max_expires_ns": st.sampled_from([0, S]),
    "max_bytes": st.sampled_from([0, 7]),
    "headers_only": flags,
    "inactive_threshold_ns": st.sampled_from([0, S]),
    "metadata": metadata,
    "num_replicas": st.sampled_from([0, 1]),
    "mem_storage": flags,
}
stream_drafts = st.fixed_dictionaries({"name": st.just("S")}, optional=STREAM)
consumer_drafts = st.fixed_dictionaries({"name": st.just("c"), "durable": flags}, optional=CONSUMER)
starts: list[Any] = [
    {},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 7},
    {"deliver_policy": "by_start_time", "opt_start_time_ns": 1_700_000_000_000_000_123},
]


def stream_of(draft: Any) -> StreamConfig | None:
    """The configuration that a draft asks for, None when it is refused."""
    try:
        return normalise_stream(draft)
    except ApiError:
        return None


def consumer_of(draft: Any, caps: ConsumerLimits) -> ConsumerConfig | None:
    try:
        return complete_consumer(normalise_consumer(draft), caps)
    except ApiError:
        return None


def test_strategies_know_every_field() -> None:
    assert STREAM.keys() | {"name"} == StreamDraft.__annotations__.keys()
    known = CONSUMER.keys() | {"name", "durable", "opt_start_seq", "opt_start_time_ns"}
    assert known == ConsumerDraft.__annotations__.keys()


@given(stream_drafts, flags)
def test_stream_sent_back_as_it_was_shown_is_the_same(draft: Any, pedantic: bool) -> None:
    config = stream_of(draft)
    if config is None:
        return
    shown = as_document(stream_shown.config_json(config))
    body = stream_config.StreamConfigBody.model_validate(shown)
    assert normalise_stream(stream_config.stream_draft(body), pedantic=pedantic) == config
    assert config.metadata.keys() <= {"k", "_nats.req.level"}


@given(consumer_drafts, st.sampled_from(starts), flags, flags)
def test_consumer_sent_back_as_it_was_shown_is_the_same(
    draft: Any, start: Any, capped: bool, pedantic: bool
) -> None:
    caps = ConsumerLimits(inactive_threshold_ns=S, max_ack_pending=5 if capped else 0)
    config = consumer_of(draft | start, caps)
    if config is None:
        return
    shown = as_document(consumer_config.config_json(config))
    body = consumer_config.ConsumerConfigBody.model_validate(shown)
    again = consumer_config.consumer_draft(body, durable=not _is_ephemeral(body))
    assert complete_consumer(normalise_consumer(again, pedantic=pedantic), caps) == config
    assert config.metadata.keys() <= {"k", "_nats.req.level"}


@each("asked", model.Compression.__args__)  # type: ignore[attr-defined]
def test_compression_is_kept_as_it_was_asked_for(asked: str) -> None:
    draft: Any = {"name": "S", "compression": asked}
    assert normalise_stream(draft, pedantic=True).compression == asked
