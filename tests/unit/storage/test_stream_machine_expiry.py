"""The stream machine against a plain list where messages live for a time of their own."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from contrail_common.model import TTL_NEVER, StreamConfig
from tests.unit.storage.test_stream_machine_model import StreamComparison

expiring_configs = st.builds(
    StreamConfig,
    name=st.just("S"),
    subjects=st.just(("a", "b", "a.>", "b.>")),
    max_age_ns=st.sampled_from([0, 5, 5]),
    max_msgs_per_subject=st.sampled_from([-1, 1, 3]),
    duplicate_window_ns=st.just(10),
    allow_rollup_hdrs=st.booleans(),
    allow_msg_ttl=st.just(True),
    subject_delete_marker_ttl_ns=st.sampled_from([0, 0, 4]),
)


class ExpiringStreamComparison(StreamComparison):
    """The same for streams without other limits, where much expires."""

    @initialize(config=expiring_configs, first_seq=st.just(1))
    def make(self, config: StreamConfig, first_seq: int) -> None:
        super().make(config, first_seq)

    @rule(config=expiring_configs, keep=st.just(True))
    def change_configuration(self, config: StreamConfig, keep: bool) -> None:
        super().change_configuration(config, keep)

    def draw_ttl(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from([None, None, 1, 3, 8, TTL_NEVER, TTL_NEVER]))


@pytest.mark.long
def test_machine_is_the_naive_stream_where_much_expires() -> None:
    run_state_machine_as_test(ExpiringStreamComparison, settings=settings())
