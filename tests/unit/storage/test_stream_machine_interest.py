"""The stream machine against a plain list where messages go by acks, and consumers work."""

import contextlib
from typing import ClassVar, cast

import pytest

from contrail_common.config_rules import (
    ConsumerDraft,
    StreamDraft,
    normalise_consumer,
    normalise_stream,
)
from contrail_common.errors import ApiError
from contrail_common.model import AckKind
from contrail_storage.core.results import Result
from tests.unit.storage.archive_rig import (
    comparable,
    messages_of,
    packed,
    records_of,
    restored,
)
from tests.unit.storage.machine_rig import Message, Outcome, append_of, consumer_config, outcomes
from tests.unit.storage.stream_agreement import IDS
from tests.unit.storage.test_stream_machine_model import (
    MAYBE,
    NAMES,
    Choices,
    StreamComparison,
    make_pages_small,
)
from tests.unit.storage.walks import explore, rule

FILTERS: list[tuple[tuple[str, ...], tuple[str, ...] | None]] = [
    ((), None),
    (("a", "a.*"), ("b",)),
    (("a.>",), ("b", "*.x.y")),
    ((), ()),
    (("a",), ()),
]


class InterestComparison(StreamComparison):
    """Drives a stream whose messages go by acks, and consumers that work."""

    configs: ClassVar[Choices] = {
        "subjects": [("a", "b", "*.*", "b.x.y")],
        "retention": ["interest", "interest", "workqueue"],
        "max_msgs_per_subject": [-1, -1, -1, 3],
        "allow_rollup_hdrs": [True, False],
        "allow_atomic": [True],
    }

    def begin(self) -> None:
        first_seq, max_deliver = self.one_of([1, 1, 1_000]), self.one_of([-1, 1])
        self.make(self.any_config(), first_seq)
        for name, own in zip(NAMES, self.one_of(FILTERS), strict=True):
            if own is not None:
                config = consumer_config(name, filter_subjects=own, max_deliver=max_deliver)
                self.put_consumer_of(config, first_seq)

    @rule(6, count=range(1, 9))
    def publish(self, count: int) -> None:
        batch = [Message(self.one_of(self.subjects), b"x") for _ in range(count)]
        expected = self.naive.append(self.now_ns, batch)
        self.do(append_of(batch), lambda result: self._compare(result, expected))

    def _compare(self, result: Result, expected: list[Outcome]) -> None:
        assert outcomes(result, len(expected)) == expected

    @rule(8, name=NAMES, count=range(1, 6), skipped=range(3), term=MAYBE)
    def work(self, name: str, count: int, skipped: int, term: bool) -> None:
        self.deliver(name, count, 0, removed=False)
        consumer = self.naive.consumers.get(name)
        acked = sorted(consumer.pending)[skipped:] if consumer else []
        others: list[tuple[AckKind, int, int]] = []
        if term and acked:
            others.append(("term", acked.pop(), 0))
        self.acknowledge_these(name, acked, others)

    @rule(name=NAMES, count=range(1, 4))
    def work_on_the_newest(self, name: str, count: int) -> None:
        self.deliver(name, 4, 0, removed=False)
        consumer = self.naive.consumers.get(name)
        self.acknowledge_these(name, sorted(consumer.pending)[-count:] if consumer else [], [])

    @rule(1)
    def archive(self) -> None:
        self.close_entry()
        data = packed(records_of(self.rig))
        if not self.is_allowed():
            return
        other = restored(data)
        assert comparable(other, IDS) == comparable(self.rig, IDS)
        assert list(messages_of(other)) == list(messages_of(self.rig))

    def is_allowed(self) -> bool:
        """Whether a server would take the configurations, which it looks at in an archive."""
        consumers = [consumer.config for consumer in self.naive.consumers.values()]
        with contextlib.suppress(ApiError):
            stream = {name: getattr(self.config, name) for name in StreamDraft.__annotations__}
            return normalise_stream(cast(StreamDraft, stream)) == self.config and all(
                normalise_consumer(
                    cast(
                        ConsumerDraft,
                        {name: getattr(one, name) for name in ConsumerDraft.__annotations__},
                    )
                )
                == one
                for one in consumers
            )
        return False


@pytest.mark.long
def test_machine_with_interest_is_the_naive_stream_over_any_history() -> None:
    explore(InterestComparison)


@pytest.mark.long
def test_machine_with_interest_is_the_naive_stream_when_pages_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_pages_small(monkeypatch)
    explore(InterestComparison)
