"""The schemas of the OpenAPI document, in forms that all code generators understand.

msgspec and pydantic describe the same type differently. Both use parts of JSON Schema that
generators refuse or ignore: tuples as ``prefixItems``, integers without a size, enums in place.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args

from contrail_common import model
from contrail_common.timeunits import INT64_MAX
from contrail_edge.inputs import schema_marks

Schema = Mapping[str, Any]

REF: Final = "#/components/schemas/{name}"
_INT32_MAX: Final = (1 << 31) - 1
_KEPT_BESIDE_REF: Final = ("description", "default")

_DURATION: Final[Schema] = {
    "type": "string",
    "description": (
        "A duration: one or more numbers, each with a unit (ns, us, ms, s, m, h, or d for 24 "
        "hours). In answers, a single integer with the largest unit that divides the "
        "duration evenly."
    ),
    "default": "0s",  # beside a reference to a string, generators write defaults without quotes
    "maxLength": 64,
    "pattern": r"^[-+]?(0|([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h|d))+)$",
    "examples": ["90s", "1h30m", "7d"],
}
_TIME_TO_LIVE: Final[Schema] = {
    "type": "string",
    "description": (
        "How long to keep a message: a number of seconds, a duration of at least 1s, or `never`."
    ),
    "examples": ["90s", "3600", "never"],
}
_JSON_VALUE: Final[Schema] = {
    "type": "object",
    "description": "Any JSON value, not only an object. It is stored as compact JSON.",
}
_ENUMS: Final[Mapping[str, tuple[str, ...]]] = {
    "AckKind": get_args(model.AckKind),
    "AckPolicy": get_args(model.AckPolicy),
    "ArrowSchema": ("contrail", "spark"),
    "ClusterStatus": ("healthy", "degraded", "unavailable"),
    "Compression": ("none", "lz4", "zstd", "s2"),
    "Consistency": ("leader", "any"),
    "DeliverPolicy": get_args(model.DeliverPolicy),
    "Discard": ("old", "new"),
    "Erasure": get_args(model.Erasure),
    "ErasureStatus": ("pending", "done"),
    "EventAction": get_args(model.AdvisoryAction),
    "EventType": get_args(Literal[model.AdvisoryType, "lost"]),
    "GroupKind": ("meta", "replicated", "single"),
    "MemberRole": ("leader", "follower", "unknown"),
    "PayloadForm": ("auto", "base64"),
    "Retention": get_args(model.Retention),
    "Storage": get_args(model.Storage),
}
_FORMAT_NAMES: Final = {
    schema_marks.DURATION["format"]: "Duration",
    schema_marks.TTL["format"]: "TimeToLive",
    schema_marks.JSON["format"]: "JsonValue",
}
_ENUM_NAMES: Final = {frozenset(values): name for name, values in _ENUMS.items()}

NAMED: Final[Mapping[str, Schema]] = {
    "Duration": _DURATION,
    "TimeToLive": _TIME_TO_LIVE,
    "JsonValue": _JSON_VALUE,
    **{name: {"type": "string", "enum": list(values)} for name, values in _ENUMS.items()},
}
"""Schemas that :func:`generic` replaces by references to their names."""


def generic(schema: Schema) -> dict[str, Any]:
    """Return ``schema`` in a form that code generators understand. It accepts no other values.

    Unavailable fields are left out. Enums and durations become references to named schemas.
    """
    made = _with_parts(schema)
    _retype_tuple(made)
    _size_integer(made)
    if made.get("contentEncoding") == "base64":
        made["format"] = "byte"
    if made.get("default", 0) is None:
        del made["default"]
    if "enum" in made:
        made.setdefault("type", "string")
    name = _name_of(made)
    return made if name is None else _reference(name, made)


def shown(example: Any, schema: Schema, named: Mapping[str, Schema]) -> Any:
    """Return ``example`` without fields that ``schema`` leaves out.

    ``named`` are the components.
    """
    while "$ref" in schema:
        schema = named[schema["$ref"].rpartition("/")[2]]
    properties = schema.get("properties", {})
    if isinstance(example, dict) and properties:
        return {
            name: shown(value, properties[name], named)
            for name, value in example.items()
            if name in properties
        }
    if isinstance(example, list) and "items" in schema:
        return [shown(value, schema["items"], named) for value in example]
    return example


def references(part: Any) -> Iterator[str]:
    """Yield the names of the schemas that ``part`` of the document refers to."""
    if isinstance(part, Mapping):
        reference = part.get("$ref")
        prefix = REF.format(name="")
        if isinstance(reference, str) and reference.startswith(prefix):
            yield reference.removeprefix(prefix)
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from references(each)


def _with_parts(schema: Schema) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in schema.items():
        match key, value:
            case "title", str():
                pass  # repeats the name
            case "properties", Mapping():
                made[key] = {
                    name: generic(each)
                    for name, each in value.items()
                    if not schema_marks.UNAVAILABLE.items() <= each.items()
                }
            case (("anyOf" | "oneOf" | "allOf" | "prefixItems"), list()):
                made[key] = [generic(each) for each in value]
            case (("items" | "additionalProperties"), Mapping()):
                made[key] = generic(value)
            case _:
                made[key] = value
    if "required" in made:
        made["required"] = [name for name in made["required"] if name in made["properties"]]
        if not made["required"]:
            del made["required"]
    return made


def _retype_tuple(schema: dict[str, Any]) -> None:
    if "prefixItems" not in schema:
        return
    # Generators know arrays of one type.
    first, *others = schema.pop("prefixItems")
    assert all(other == first for other in others), "a tuple of several types has no plain schema"
    schema["items"] = first


def _size_integer(schema: dict[str, Any]) -> None:
    """Add an integer's format, make its limits integers, and drop the limits of the format."""
    if schema.get("type") != "integer":
        return
    for key in ("minimum", "maximum"):
        # FastAPI turns bounds into floats, which hold neither end of 64 bits.
        if key in schema and abs(schema[key]) >= INT64_MAX:
            del schema[key]
        elif key in schema:
            schema[key] = int(schema[key])
    small = schema.get("maximum", INT64_MAX) <= _INT32_MAX
    schema.setdefault("format", "int32" if small else "int64")


def _name_of(schema: Schema) -> str | None:
    values = schema.get("enum")
    if values is not None:
        return _ENUM_NAMES.get(frozenset(values))
    return _FORMAT_NAMES.get(schema.get("format", ""))


def _reference(name: str, schema: Schema) -> dict[str, Any]:
    """Return a reference to ``name`` that replaces ``schema``, which may also accept null."""
    reference = {"$ref": REF.format(name=name)}
    beside = {key: schema[key] for key in _KEPT_BESIDE_REF if key in schema}
    if "default" in NAMED[name]:
        assert beside.pop("default", 0) in (0, ""), "a default of its own is none of the schema's"
    if {"type": "null"} in schema.get("anyOf", ()):
        return {"anyOf": [reference, {"type": "null"}], **beside}
    return {**reference, **beside}
