"""Tests of tables: one item that runs for each case and reports every case that fails."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

TITLE_CHARS_MAX = 120
_Param = type(pytest.param())


def each(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    ids: Callable[[Any], str] | Sequence[str] = repr,
) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each of ``cases``, like ``pytest.mark.parametrize`` but as a single item.

    The cases share the fixtures of the test, so it suits tests that leave nothing behind: those of
    functions, of registries, and of requests that are refused. A failing case is a failing subtest
    whose title shows its values by ``ids`` or is its id; the others still run. Several decorators
    multiply.
    """
    arguments = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
    if not callable(ids):
        cases = [
            pytest.param(*_values(case, arguments), id=one)
            for case, one in zip(cases, ids, strict=True)
        ]
        ids = repr
    table = [_case(case, arguments, ids) for case in cases]
    assert table, "a test without cases shows nothing"

    def decorate(test: Callable[..., None]) -> Any:
        inner = getattr(test, "one_case", test)
        outer_table = getattr(test, "cases", [("", {})])
        product = [
            (", ".join(filter(None, (title, other))), {**values, **others})
            for other, others in outer_table
            for title, values in table
        ]

        @functools.wraps(inner)
        def all_cases(*, subtests: pytest.Subtests, **fixtures: Any) -> None:
            for title, values in product:
                with subtests.test(title[:TITLE_CHARS_MAX]):
                    inner(**values, **fixtures)

        asked = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(inner).parameters
        fixtures = [one for name, one in parameters.items() if name not in product[0][1]]
        all_cases.__signature__ = inspect.Signature([*fixtures, asked])  # type: ignore[attr-defined]
        all_cases.one_case = inner  # type: ignore[attr-defined]
        all_cases.cases = product  # type: ignore[attr-defined]
        return all_cases

    return decorate


def _values(case: Any, names: list[str]) -> tuple[Any, ...]:
    return tuple(case) if len(names) > 1 else (case,)


def _case(case: Any, names: list[str], ids: Callable[[Any], str]) -> tuple[str, dict[str, Any]]:
    param = case if isinstance(case, _Param) else pytest.param(*_values(case, names))
    values = dict(zip(names, param.values, strict=True))
    return param.id or ", ".join(f"{name}={ids(value)}" for name, value in values.items()), values
