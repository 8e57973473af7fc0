"""Tests of tables: one item that runs for each case and reports every case that fails."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

TITLE_CHARS_MAX = 120


def each(
    names: str | tuple[str, ...], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each of ``cases``, like ``pytest.mark.parametrize`` but as a single item.

    The cases share the fixtures of the test, so it suits tests that leave nothing behind: those of
    functions, of registries, and of requests that are refused. A failing case is a failing subtest,
    and the others still run. Several decorators multiply.
    """
    arguments = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
    table = [case if len(arguments) > 1 else (case,) for case in cases]
    assert table, "a test without cases shows nothing"
    assert all(len(case) == len(arguments) for case in table)

    def decorate(test: Callable[..., None]) -> Any:
        inner = getattr(test, "one_case", test)
        inner_arguments, inner_table = getattr(test, "cases", ([], [()]))
        product = [(*mine, *theirs) for theirs in inner_table for mine in table]
        named = [*arguments, *inner_arguments]

        @functools.wraps(inner)
        def all_cases(*, subtests: pytest.Subtests, **fixtures: Any) -> None:
            for case in product:
                given = dict(zip(named, case, strict=True))
                with subtests.test(_title(given)):
                    inner(**given, **fixtures)

        parameters = inspect.signature(inner).parameters
        kept = [one for name, one in parameters.items() if name not in named]
        asked = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        if "subtests" not in parameters:
            kept.append(asked)
        all_cases.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        all_cases.one_case = inner  # type: ignore[attr-defined]
        all_cases.cases = (named, product)  # type: ignore[attr-defined]
        return all_cases

    return decorate


def _title(given: dict[str, Any]) -> str:
    title = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return title if len(title) <= TITLE_CHARS_MAX else title[: TITLE_CHARS_MAX - 3] + "..."
