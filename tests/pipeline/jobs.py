"""A job without Spark: its tasks run in this process."""

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from contrail_client import Contrail


class LocalJob:
    """A job whose tasks run in this process: what is tested here is the order of the steps."""

    dry_run = False
    as_json = True

    def __init__(self, client: Contrail | None = None, url: str = "") -> None:
        self.client = client
        self.results: list[dict[str, Any]] = []
        self._url = url

    def server_options(self, stream: str) -> dict[str, str]:
        return {"url": self._url, "stream": stream}

    def spark(self) -> Any:
        context = SimpleNamespace(defaultParallelism=2)
        return _Entered(SimpleNamespace(sparkContext=context))

    def progress(self, *_: object) -> Any:
        return _Entered(lambda _: None)

    def done(self, _: str, result: dict[str, Any]) -> None:
        self.results.append(result)


@contextmanager
def no_space() -> Iterator[None]:
    """This process can write nothing to files, with an error that does not name them."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


class _Entered:
    """A context that yields a value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __enter__(self) -> Any:
        return self._value

    def __exit__(self, *_: object) -> None:
        pass


def run_here(
    _: object, tasks: Sequence[Any], work: Callable[[Any], Any], finished: Callable[[int], None]
) -> list[Any]:
    """What `run_tasks` does, one task after another."""
    return [work(task) for task in tasks]
