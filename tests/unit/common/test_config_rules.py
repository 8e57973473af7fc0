"""The rules of stream and consumer configurations."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from contrail_common import errors
from contrail_common.config_rules import (
    SUBJECTS_MAX,
    ConsumerDraft,
    StreamDraft,
    check_consumer_update,
    check_stream_create,
    check_stream_update,
    complete_consumer,
    normalise_consumer,
    normalise_stream,
    over_limits,
    sealed,
)
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import ConsumerConfig, ConsumerLimits, StreamConfig
from contrail_common.timeunits import NS_PER_MS, NS_PER_S
from tests.support.each import each


def stream(pedantic: bool = False, **draft: Any) -> StreamConfig:
    return normalise_stream(cast(StreamDraft, {"name": "S", **draft}), pedantic=pedantic)


def consumer(
    pedantic: bool = False, limits: ConsumerLimits | None = None, **draft: Any
) -> ConsumerConfig:
    asked = normalise_consumer(cast(ConsumerDraft, {"name": "c", **draft}), pedantic=pedantic)
    return complete_consumer(asked, limits or ConsumerLimits())


def refusal(call: Callable[[], object]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        call()
    return refused.value


# Streams -----------------------------------------------------------------------------------------
def test_stream_without_subjects_captures_its_name() -> None:
    assert stream().subjects == ("S",)


@each("field", ["max_msgs", "max_bytes", "max_msg_size", "max_consumers"])
@each("value", [0, -1, -7])
def test_limit_of_zero_or_below_is_stored_as_unlimited(field: str, value: int) -> None:
    assert getattr(stream(**{field: value}), field) == -1


@pytest.mark.parametrize("value", [0, -7])
def test_pedantic_refuses_a_limit_that_would_be_rewritten(value: int) -> None:
    assert refusal(lambda: stream(pedantic=True, max_msgs=value)).spec is errors.PEDANTIC


def test_pedantic_takes_what_is_omitted_or_exact() -> None:
    assert stream(pedantic=True, max_msgs=-1, duplicate_window_ns=NS_PER_S).max_bytes == -1


def test_duplicate_window_defaults_to_two_minutes_but_not_beyond_max_age() -> None:
    assert stream().duplicate_window_ns == 120 * NS_PER_S
    assert stream(max_age_ns=NS_PER_S).duplicate_window_ns == NS_PER_S


@each(
    ("draft", "pointer"),
    [
        ({"max_age_ns": -1}, "/max_age"),
        ({"max_age_ns": 99 * NS_PER_MS}, "/max_age"),
        ({"duplicate_window_ns": -1}, "/duplicate_window"),
        ({"duplicate_window_ns": 99 * NS_PER_MS}, "/duplicate_window"),
        ({"duplicate_window_ns": 2 * NS_PER_S, "max_age_ns": NS_PER_S}, "/duplicate_window"),
        ({"num_replicas": 2}, "/num_replicas"),
        ({"num_replicas": 4}, "/num_replicas"),
        ({"num_replicas": 6}, "/num_replicas"),
        ({"num_replicas": 3, "storage": "memory"}, "/num_replicas"),
        ({"first_seq": -1}, "/first_seq"),
        ({"subject_delete_marker_ttl_ns": -1}, "/subject_delete_marker_ttl"),
        ({"subject_delete_marker_ttl_ns": NS_PER_S - 1}, "/subject_delete_marker_ttl"),
        ({"description": "x" * 4097}, "/description"),
        ({"metadata": {"k": "v" * 131_072}}, "/metadata"),
        ({"subjects": ("a b",)}, "/subjects/0"),
        ({"subjects": ("a", "b..c")}, "/subjects/1"),
        ({"subjects": ("a.>.b",)}, "/subjects/0"),
        ({"subjects": ("a", "a")}, "/subjects"),
        ({"subjects": ("a.*.c", "a.b.*")}, "/subjects"),
        ({"subjects": ("*.b",)}, "/subjects/0"),
        ({"subjects": ("a.>", "a.b")}, "/subjects"),
        ({"subjects": (">",)}, "/subjects/0"),
        ({"subjects": ("$CONTRAIL.x",)}, "/subjects/0"),
        ({"subjects": ("$JS.API.>",)}, "/subjects/0"),
        ({"subjects": ("$SYS.>",)}, "/subjects/0"),
        ({"subjects": tuple(f"s{n}" for n in range(SUBJECTS_MAX + 1))}, "/subjects"),
        ({"name": ""}, "/name"),
        ({"name": "a.b"}, "/name"),
        ({"name": "a b"}, "/name"),
        ({"name": "x" * 256}, "/name"),
    ],
)
def test_invalid_stream_is_refused_at_its_field(draft: dict[str, Any], pointer: str) -> None:
    refused = refusal(lambda: stream(**draft))
    assert refused.spec is errors.STREAM_CONFIG_INVALID
    assert [field.pointer for field in refused.fields] == [pointer]


@each("name", ["a/b", "a\\b", "/", "a /"])
def test_name_of_a_stream_with_a_path_separator_has_a_code_of_its_own(name: str) -> None:
    refused = refusal(lambda: stream(name=name))
    assert refused.spec is errors.STREAM_NAME_SEPARATOR
    assert [field.pointer for field in refused.fields] == ["/name"]


@each("subject", ["$JS.EVENT.>", "$SYS.ACCOUNT.>", "$KV.bucket.>", "*"])
def test_subjects_outside_the_reserved_ones_are_taken(subject: str) -> None:
    assert stream(subjects=(subject,)).subjects == (subject,)


def test_replicas_are_one_three_or_five() -> None:
    assert refusal(lambda: stream(num_replicas=-1)).spec is errors.REPLICAS_NEGATIVE
    assert [stream(num_replicas=given).num_replicas for given in (0, 1, 3, 5)] == [1, 1, 3, 5]


def test_sealed_stream_keeps_and_takes_nothing() -> None:
    config = stream(sealed=True, max_age_ns=NS_PER_S)
    assert (config.discard, config.max_age_ns) == ("new", 0)
    assert config.deny_delete
    assert config.deny_purge
    assert refusal(lambda: check_stream_create(config)).spec is errors.STREAM_CONFIG_INVALID


@each(
    ("old", "new"),
    [
        ({"first_seq": 5}, {}),
        ({"deny_delete": True}, {}),
        ({"deny_purge": True}, {}),
        ({"allow_msg_ttl": True}, {}),
        ({"deny_purge": True}, {"deny_purge": True, "subject_delete_marker_ttl_ns": NS_PER_S}),
    ],
)
def test_forbidden_stream_change_is_409_with_the_code_of_an_invalid_config(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    refused = refusal(lambda: check_stream_update(stream(**old), stream(**new)))
    assert (refused.spec.status, refused.spec.code) == (409, 10052)


def test_unsealing_is_refused_and_sealing_is_not() -> None:
    open_config = stream()
    check_stream_update(open_config, sealed(open_config))
    refused = refusal(lambda: check_stream_update(sealed(open_config), open_config))
    assert refused.spec is errors.STREAM_UPDATE_REFUSED


def test_limits_subjects_and_deny_flags_may_change() -> None:
    check_stream_update(stream(), stream(max_msgs=5, subjects=("x",), deny_delete=True))


def test_markers_turn_on_what_they_need_and_off_what_is_in_their_way() -> None:
    config = stream(subject_delete_marker_ttl_ns=NS_PER_S, deny_purge=True)
    assert config.subject_delete_marker_ttl_ns == NS_PER_S
    assert (config.allow_msg_ttl, config.allow_rollup_hdrs, config.deny_purge) == (
        True,
        True,
        False,
    )
    check_stream_update(stream(allow_msg_ttl=True), config)
    check_stream_update(config, stream(allow_msg_ttl=True))


@each(
    ("given", "field"),
    [
        # Left out or said to be off, a switch that markers turn on is one that changes silently.
        ({}, "allow_rollup_hdrs"),
        ({"allow_msg_ttl": True}, "allow_rollup_hdrs"),
        ({"allow_rollup_hdrs": True}, "allow_msg_ttl"),
        ({"allow_rollup_hdrs": True, "allow_msg_ttl": False}, "allow_msg_ttl"),
        ({"allow_rollup_hdrs": True, "allow_msg_ttl": True, "deny_purge": True}, "deny_purge"),
    ],
)
def test_pedantic_refuses_switches_that_markers_would_turn(
    given: dict[str, Any], field: str
) -> None:
    marks = {"subject_delete_marker_ttl_ns": NS_PER_S}
    refused = refusal(lambda: stream(pedantic=True, **marks, **given))
    assert (refused.spec, refused.spec.status) == (errors.PEDANTIC, 422)
    assert [one.pointer for one in refused.fields] == [f"/{field}"]
    stream(**marks, **given)
    asked = marks | {"allow_msg_ttl": True, "allow_rollup_hdrs": True}
    assert stream(pedantic=True, **asked) == stream(**marks)


def test_sealed_stream_with_markers_is_what_it_shows() -> None:
    config = sealed(stream(subject_delete_marker_ttl_ns=NS_PER_S))
    shown = {name: getattr(config, name) for name in StreamDraft.__annotations__}
    assert normalise_stream(cast(StreamDraft, shown), pedantic=True) == config


# Consumers ---------------------------------------------------------------------------------------
def test_consumer_defaults_are_those_of_jetstream() -> None:
    config = consumer()
    assert config.ack_wait_ns == 30 * NS_PER_S
    assert (config.max_deliver, config.max_ack_pending, config.max_waiting) == (-1, 1000, 512)
    assert config.inactive_threshold_ns == 0
    assert consumer(durable=False).inactive_threshold_ns == 5 * NS_PER_S


def test_first_backoff_is_the_ack_wait() -> None:
    backoff_ns = (NS_PER_S, 2 * NS_PER_S)
    assert consumer(backoff_ns=backoff_ns, ack_wait_ns=9).ack_wait_ns == NS_PER_S
    pedantic = refusal(lambda: consumer(pedantic=True, backoff_ns=backoff_ns, ack_wait_ns=9))
    assert pedantic.spec is errors.PEDANTIC


def test_max_ack_pending_of_zero_is_the_default_and_below_is_unlimited() -> None:
    assert consumer(max_ack_pending=0).max_ack_pending == 1000
    assert consumer(max_ack_pending=-5).max_ack_pending == -1


@each(
    ("draft", "spec"),
    [
        ({"ack_wait_ns": -1}, errors.CONSUMER_CONFIG_INVALID),
        ({"max_waiting": -1}, errors.CONSUMER_CONFIG_INVALID),
        ({"max_batch": -1}, errors.CONSUMER_CONFIG_INVALID),
        ({"max_expires_ns": 999_999}, errors.CONSUMER_CONFIG_INVALID),
        ({"backoff_ns": (-1,)}, errors.CONSUMER_CONFIG_INVALID),
        ({"ack_policy": "none", "max_ack_pending": 5}, errors.CONSUMER_CONFIG_INVALID),
        ({"backoff_ns": (1, 2, 3), "max_deliver": 2}, errors.BACKOFF_INVALID),
        ({"filter_subjects": ("a", "")}, errors.FILTER_EMPTY),
        ({"filter_subjects": ("a..b",)}, errors.CONSUMER_CONFIG_INVALID),
        ({"filter_subjects": ("a.>", "a.b")}, errors.FILTERS_OVERLAP),
        ({"filter_subjects": ("a", "a")}, errors.FILTERS_OVERLAP),
        ({"deliver_policy": "by_start_sequence"}, errors.START_INVALID),
        ({"deliver_policy": "by_start_time"}, errors.START_INVALID),
        ({"deliver_policy": "last_per_subject"}, errors.START_INVALID),
        ({"opt_start_seq": 3}, errors.START_INVALID),
        ({"opt_start_time_ns": 3}, errors.START_INVALID),
        (
            {"deliver_policy": "by_start_sequence", "opt_start_seq": 1, "opt_start_time_ns": 3},
            errors.START_INVALID,
        ),
        ({"name": "a.b"}, errors.CONSUMER_CONFIG_INVALID),
        ({"name": "a/b"}, errors.CONSUMER_NAME_SEPARATOR),
        ({"name": "a b\\"}, errors.CONSUMER_NAME_SEPARATOR),
    ],
)
def test_invalid_consumer_is_refused_by_its_rule(draft: dict[str, Any], spec: ErrorSpec) -> None:
    refused = refusal(lambda: consumer(**draft))
    assert refused.spec is spec
    assert refused.fields[0].pointer.startswith("/")


def test_pedantic_refuses_a_max_ack_pending_of_zero() -> None:
    refused = refusal(lambda: consumer(pedantic=True, max_ack_pending=0))
    assert refused.spec is errors.PEDANTIC
    assert consumer(pedantic=True).max_ack_pending == 1000


def test_limits_of_the_stream_are_the_defaults_of_a_consumer() -> None:
    limits = ConsumerLimits(inactive_threshold_ns=NS_PER_S, max_ack_pending=2_000)
    for durable in (True, False):
        config = consumer(limits=limits, durable=durable)
        assert (config.inactive_threshold_ns, config.max_ack_pending) == (NS_PER_S, 2_000)
        assert over_limits(config, limits) is None


@each(
    ("draft", "spec"),
    [
        ({"max_ack_pending": 10, "inactive_threshold_ns": NS_PER_S}, None),
        ({"max_ack_pending": 11}, errors.CONSUMER_LIMITS_EXCEEDED),
        ({"max_ack_pending": -1}, errors.CONSUMER_LIMITS_EXCEEDED),
        ({"ack_policy": "none", "inactive_threshold_ns": 1}, None),
        ({"inactive_threshold_ns": NS_PER_S + 1}, errors.CONSUMER_THRESHOLD_EXCEEDED),
    ],
)
def test_consumer_over_a_limit_of_its_stream_learns_which(
    draft: dict[str, Any], spec: ErrorSpec | None
) -> None:
    limits = ConsumerLimits(inactive_threshold_ns=NS_PER_S, max_ack_pending=10)
    assert over_limits(consumer(limits=limits, **draft), limits) is spec


def test_filters_that_only_overlap_in_part_are_taken() -> None:
    assert consumer(filter_subjects=("a.*", "*.b")).filter_subjects == ("a.*", "*.b")


@each(
    "changed",
    [
        {"durable": False},
        {"deliver_policy": "new"},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 4},
        {"ack_policy": "all"},
        {"max_waiting": 5},
    ],
)
def test_forbidden_consumer_change_is_refused(changed: dict[str, Any]) -> None:
    refused = refusal(lambda: check_consumer_update(consumer(), consumer(**changed)))
    assert (refused.spec.status, refused.spec.code) == (409, 10052)


def test_filters_and_limits_of_a_consumer_may_change() -> None:
    check_consumer_update(
        consumer(), consumer(filter_subjects=("a",), max_deliver=3, max_ack_pending=7)
    )
