"""The stream machine against a plain list where messages live for a time of their own."""

from typing import ClassVar

import pytest

from contrail_common.model import TTL_NEVER
from tests.unit.storage.test_stream_machine_model import Choices, StreamComparison
from tests.unit.storage.walks import explore


class ExpiringStreamComparison(StreamComparison):
    """The same for streams without other limits, where much expires."""

    configs: ClassVar[Choices] = {
        "subjects": [("a", "b", "a.>", "b.>")],
        "max_age_ns": [5, 0],
        "max_msgs_per_subject": [-1, -1, 1, 3],
        "duplicate_window_ns": [10],
        "allow_rollup_hdrs": [True, False],
        "allow_msg_ttl": [True],
        "subject_delete_marker_ttl_ns": [0, 4, 4],
    }
    ttls = (None, None, 1, 3, 8, TTL_NEVER, TTL_NEVER)
    first_seqs = (1,)
    shard_counts = (1,)


@pytest.mark.long
def test_machine_is_the_naive_stream_where_much_expires() -> None:
    explore(ExpiringStreamComparison)
