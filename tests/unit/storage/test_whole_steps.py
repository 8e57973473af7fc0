"""Work in a thread that is never left behind."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from contrail_storage.disk.whole_steps import whole


def test_result_and_error_come_back() -> None:
    def fail() -> None:
        raise OSError("no")

    async def scene() -> None:
        assert await whole(lambda: 7) == 7
        with pytest.raises(OSError, match="no"):
            await whole(fail)

    asyncio.run(scene())


@pytest.mark.long
def test_who_is_cancelled_waits_for_the_thread_and_its_error_is_nobodys() -> None:
    begun, may_end = threading.Event(), threading.Event()
    complaints: list[dict[str, Any]] = []

    def fail_late() -> None:
        begun.set()
        may_end.wait()
        raise OSError("too late")

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        task = asyncio.create_task(whole(fail_late))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()

    asyncio.run(scene())
    assert complaints == []
