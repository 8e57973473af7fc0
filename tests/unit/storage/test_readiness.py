"""What is not ready is named, also where there is no stream to name."""

from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.readiness import problems_of
from contrail_storage.replica.shard import Shard
from tests.unit.storage.machine_rig import SHARD, Shelf


def test_damaged_shard_of_an_interrupted_restore_is_named_by_its_number() -> None:
    shard = Shard(StreamMachine(SHARD, Shelf()), 0, damaged="block 7 cannot be read")

    assert problems_of("", (), [shard], (), serves=True) == {
        f"shard {SHARD}": "block 7 cannot be read"
    }
