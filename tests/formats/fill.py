"""Values of any declared type, with a different content in each field."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect


def filled(kind: Any) -> Any:
    """A value of a type: optional fields are there, and no two fields have the same content."""
    return _value(inspect.type_info(kind), itertools.count(1))


def _value(info: inspect.Type, count: Iterator[int]) -> Any:
    match info:
        case inspect.UnionType():
            return _value(next(one for one in info.types if not _is_none(one)), count)
        case inspect.IntType():
            return _within(next(count), info.ge, info.gt, info.le, info.lt)
        case inspect.ListType() | inspect.CollectionType():
            return [_value(info.item_type, count) for _ in range(2)]
        case inspect.VarTupleType():
            return tuple(_value(info.item_type, count) for _ in range(2))
        case inspect.TupleType():
            return tuple(_value(one, count) for one in info.item_types)
        case inspect.DictType():
            return {_value(info.key_type, count): _value(info.value_type, count) for _ in range(2)}
        case inspect.StructType():
            return info.cls(**{one.name: _value(one.type, count) for one in info.fields})
    return _plain(info, next(count))


def _plain(info: inspect.Type, number: int) -> Any:
    match info:
        case inspect.LiteralType():
            return info.values[-1]
        case inspect.EnumType():
            return list(info.cls)[-1]
    return {
        inspect.BoolType: True,
        inspect.FloatType: number + 0.5,
        inspect.StrType: f"t{number}",
        inspect.BytesType: b"b%d" % number,
        inspect.AnyType: f"any{number}",
        inspect.NoneType: None,
    }[type(info)]


def _is_none(info: inspect.Type) -> bool:
    return isinstance(info, inspect.NoneType)


def _within(number: int, ge: int | None, gt: int | None, le: int | None, lt: int | None) -> int:
    low = ge if ge is not None else gt + 1 if gt is not None else None
    high = le if le is not None else lt - 1 if lt is not None else None
    number = number if low is None else max(number, low)
    return number if high is None else min(number, high)


def meaning(value: Any) -> Any:
    """A value as JSON that also a later release can make of it, if it has the same meaning.

    Fields of structs that are arrays on the wire are named by their position.
    """
    if isinstance(value, msgspec.Struct):
        names: Any = value.__struct_encode_fields__
        if value.__struct_config__.array_like:
            names = map(str, range(len(names)))
        fields = (getattr(value, name) for name in value.__struct_fields__)
        return {name: meaning(each) for name, each in zip(names, fields, strict=True)}
    if isinstance(value, dict):
        return [[meaning(key), meaning(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [meaning(each) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return msgspec.to_builtins(value)


def says(found: Any, expected: Any) -> bool:
    """Whether a meaning has all of another one. Structs may have further fields."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return all(name in found and says(found[name], expected[name]) for name in expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(says, found, expected))
    return bool(found == expected)
