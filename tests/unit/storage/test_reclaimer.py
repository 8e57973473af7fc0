"""Files that are mostly garbage are rewritten, again and again, and nothing ends the node."""

import asyncio

from contrail_storage.store.rocks_store import StoreClosedError, StoreFailedError
from contrail_storage.upkeep.reclaimer import Reclaimer


class ScriptedStore:
    """A store whose answers are given."""

    def __init__(self, answers: list[int | Exception]) -> None:
        self.answers = answers

    def reclaim(self, *, pressing: bool = False) -> int:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_reclaiming_continues_after_a_failure_and_ends_with_the_store() -> None:
    store = ScriptedStore([7, StoreFailedError("disk"), 0, 5, StoreClosedError("closed"), 1])
    reclaimer = Reclaimer(store, pause_s=0.0)
    asyncio.run(reclaimer.run())
    assert reclaimer.reclaimed_bytes == 12
    assert store.answers == [1]
