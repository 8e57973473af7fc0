"""Descriptions of the fields of structs, which are the docstrings below the fields.

Python does not keep these docstrings, so they are read from the source, as pydantic does for its
models (``use_attribute_docstrings``).
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, get_args

import msgspec


def describe_fields(schemas: Mapping[str, dict[str, Any]], structs: Iterable[type]) -> None:
    """Add the descriptions of fields to ``schemas`` of structs and of those that they contain."""
    for kind in _with_inner(structs):
        texts = _texts_of(kind)
        for field in msgspec.structs.fields(kind):
            schema = schemas[kind.__name__]["properties"][field.encode_name]
            if field.name in texts:
                schema.setdefault("description", texts[field.name])


def describe_as_given(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Describe the fields of a shown configuration as those of the accepted one.

    The names of their schemas are the same, except that one ends in ``Json``, the other in
    ``Body``.
    """
    for name, schema in schemas.items():
        given = schemas.get(f"{name.removesuffix('Json')}Body", schema).get("properties", {})
        for field, shown in schema.get("properties", {}).items():
            text = given.get(field, {}).get("description")
            if text is not None:
                shown.setdefault("description", text)


def _with_inner(structs: Iterable[type]) -> set[type]:
    found: set[type] = set()
    left = list(structs)
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left += [
                one for field in msgspec.structs.fields(kind) for one in _structs_of(field.type)
            ]
    return found


def _structs_of(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for part in get_args(annotation):
        yield from _structs_of(part)


def _texts_of(kind: type) -> dict[str, str]:
    """Return the descriptions of the fields of a struct, also of those that it inherits."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            texts |= _texts_in(base.__module__).get(base.__name__, {})
    return texts


@functools.cache
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of each class of a module."""
    source = inspect.getsource(sys.modules[module])
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {one.name: dict(_docstrings(one.body)) for one in classes}


def _docstrings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield field.target.id, " ".join(str(text.value.value).split())
