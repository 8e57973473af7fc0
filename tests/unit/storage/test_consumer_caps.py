"""The caps of a stream for its consumers, where commands are decided."""

from typing import Any

from contrail_common import errors
from contrail_common.errors import ErrorSpec
from contrail_common.model import ConsumerLimits, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import ConsumerPut, Done, Refused
from tests.support.each import each
from tests.unit.storage.dispatcher_rig import DispatcherRig, run
from tests.unit.storage.machine_rig import configure, consumer_config

LIMITS = ConsumerLimits(max_ack_pending=5, inactive_threshold_ns=9)
AT_LIMITS = {"max_ack_pending": 5, "inactive_threshold_ns": 9}


def limited(limits: ConsumerLimits) -> StreamConfig:
    return StreamConfig(name="S", subjects=("a.*", "b"), consumer_limits=limits)


@each(
    ("over", "spec"),
    [
        ({"max_ack_pending": 6}, errors.CONSUMER_LIMITS_EXCEEDED),
        ({"max_ack_pending": -1}, errors.CONSUMER_LIMITS_EXCEEDED),
        ({"inactive_threshold_ns": 10}, errors.CONSUMER_THRESHOLD_EXCEEDED),
        ({"inactive_threshold_ns": 0}, errors.CONSUMER_THRESHOLD_EXCEEDED),
    ],
)
def test_consumer_over_a_cap_is_neither_made_nor_changed(
    over: dict[str, Any], spec: ErrorSpec
) -> None:
    async def scene() -> None:
        rig = DispatcherRig(limited(LIMITS), consumer_fields=AT_LIMITS)
        config = consumer_config("red", **{**AT_LIMITS, **over})
        assert rig.apply(cmd.PutConsumer(config, 1)) == Refused(spec.code)
        assert rig.consumer.config == consumer_config("red", **AT_LIMITS)
        other = consumer_config("blue", **{**AT_LIMITS, **over})
        assert rig.apply(cmd.PutConsumer(other, 1)) == Refused(spec.code)
        assert rig.machine.consumer("blue") is None
        made = rig.apply(cmd.PutConsumer(consumer_config("blue", **AT_LIMITS), 1))
        assert isinstance(made, ConsumerPut)

    run(scene())


def test_caps_below_a_consumer_are_refused_and_at_it_are_taken() -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields=AT_LIMITS)
        for lower in ({"max_ack_pending": 4}, {"inactive_threshold_ns": 8}):
            refused = rig.apply(configure(limited(ConsumerLimits(**lower))))
            assert isinstance(refused, Refused)
            assert refused.code == errors.STREAM_CONFIG_INVALID.code
            assert rig.machine.config.consumer_limits == ConsumerLimits()
        assert rig.apply(configure(limited(LIMITS))) == Done()

    run(scene())
