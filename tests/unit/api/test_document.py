"""The OpenAPI document keeps to what code generators read: one test for each thing they trip on."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from contrail_api.consumers.config import ConsumerConfigBody, ConsumerConfigJson
from contrail_api.fields import unavailable_fields
from contrail_api.streams.config import StreamConfigBody, stream_draft
from contrail_api.streams.shown import StreamConfigJson
from contrail_common.config_rules import StreamDraft
from contrail_common.timeunits import parse_duration
from contrail_serve.openapi_export import document_text

DOCUMENT: dict[str, Any] = json.loads(document_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = {
    operation["operationId"]: operation
    for item in DOCUMENT["paths"].values()
    for operation in item.values()
}
FORMATS = FormatChecker(["date-time"])


@FORMATS.checks("date-time")
def is_time(value: object) -> bool:
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"
    return not isinstance(value, str) or re.fullmatch(pattern, value) is not None


def parts(value: Any, at: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the document but those in examples, with its place."""
    if isinstance(value, dict):
        yield at, value
        for key, inner in value.items():
            if key not in ("example", "examples", "default"):
                yield from parts(inner, f"{at}/{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from parts(inner, f"{at}/{number}")


def fits(value: Any, schema: dict[str, Any]) -> bool:
    whole = {**schema, "components": DOCUMENT["components"]}
    return Draft202012Validator(whole, format_checker=FORMATS).is_valid(value)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").removeprefix("#/components/schemas/")
    return SCHEMAS[name] if name else schema


def test_every_example_and_default_fits_its_schema() -> None:
    checked = Counter[str]()
    for at, part in parts(DOCUMENT):
        schema = part.get("schema", part)
        if "example" in part:
            assert fits(part["example"], part["schema"]), at
            checked["examples"] += 1
        if isinstance(part.get("default"), (str, int, bool, list)):
            assert fits(part["default"], schema), at
            checked["defaults"] += 1
        if isinstance(part.get("examples"), list):
            for example in part["examples"]:
                assert fits(example, schema), at
                checked["examples"] += 1
    assert min(checked["examples"], checked["defaults"]) > 40
    for problem in DOCUMENT["components"]["examples"].values():
        assert fits(problem["value"], SCHEMAS["Problem"])


def test_examples_keep_their_nulls_and_show_no_field_that_the_schema_leaves_out() -> None:
    answer = OPERATIONS["get_consumer"]["responses"]["200"]["content"]["application/json"]
    config = answer["example"]["config"]
    assert config["opt_start_time"] is None
    assert set(config) == set(SCHEMAS["ConsumerConfigJson"]["properties"])


def test_schemas_use_nothing_that_generators_refuse() -> None:
    for at, part in parts(DOCUMENT):
        assert "prefixItems" not in part, at
        assert part.get("items") is not False, at
        assert not any(key.startswith("x-") for key in part), at
        for bound in ("minimum", "maximum"):
            assert isinstance(part.get(bound, 0), (int, dict)), at
        if part.get("type") == "integer":
            assert part["format"] in ("int32", "int64"), at


def test_enums_have_names() -> None:
    for at, part in parts(DOCUMENT):
        if len(part.get("enum", ())) > 1:
            assert re.fullmatch("#/components/schemas/[A-Z]\\w+", at), at


def test_durations_are_one_string_schema_with_string_defaults() -> None:
    fields = {
        "ConsumerConfigBody": ("ack_wait", "max_expires", "inactive_threshold"),
        "ConsumerConfigJson": ("ack_wait", "max_expires", "inactive_threshold"),
        "StreamConfigBody": ("max_age", "duplicate_window", "subject_delete_marker_ttl"),
        "StreamConfigJson": ("max_age", "duplicate_window", "subject_delete_marker_ttl"),
    }
    for name, properties in fields.items():
        for each in properties:
            schema = SCHEMAS[name]["properties"][each]
            assert schema["$ref"] == "#/components/schemas/Duration"
            assert "default" not in schema  # Java's generator writes it without quotes
    for optional in (SCHEMAS["PullBody"]["properties"]["expires"],):
        assert {"$ref": "#/components/schemas/Duration"} in optional["anyOf"]
    duration = SCHEMAS["Duration"]
    assert (duration["type"], duration["default"]) == ("string", "0s")
    for text in ("0", "0s", "1.5h", "-5s", "1h30m", "7d", "500ms"):
        assert fits(text, duration)
        parse_duration(text)
    for text in ("", "5", "1w", "s", "1h 30m"):
        assert not fits(text, duration)
        with pytest.raises(ValueError, match="duration"):
            parse_duration(text)


def test_fields_that_are_not_available_are_not_shown() -> None:
    for model in (StreamConfigBody, ConsumerConfigBody):
        hidden = set(unavailable_fields(model))
        assert hidden
        assert not hidden & set(SCHEMAS[model.__name__]["properties"])
        answer = SCHEMAS[model.__name__.replace("Body", "Json")]["properties"]
        assert not hidden & set(answer)
        # Everything that is shown can be asked for, and back.
        assert set(answer) == set(SCHEMAS[model.__name__]["properties"])
    assert {"group", "min_pending"} & set(SCHEMAS["PullBody"]["properties"]) == set()


def test_every_field_of_a_stream_is_taken_or_refused() -> None:
    given = {"max_age": "max_age_ns", "duplicate_window": "duplicate_window_ns"}
    given["subject_delete_marker_ttl"] = "subject_delete_marker_ttl_ns"
    for name in set(StreamConfigBody.model_fields) - set(unavailable_fields(StreamConfigBody)):
        assert given.get(name, name) in StreamDraft.__annotations__, name
    assert stream_draft(StreamConfigBody(name="S")) == {"name": "S"}
    assert set(StreamConfigJson.__struct_fields__) == set(StreamConfigBody.model_fields)
    assert set(ConsumerConfigJson.__struct_fields__) == set(ConsumerConfigBody.model_fields)


def test_names_have_no_default_that_is_refused() -> None:
    for body in ("StreamConfigBody", "ConsumerConfigBody"):
        assert "default" not in SCHEMAS[body]["properties"]["name"]


def test_times_are_date_times() -> None:
    for at, part in parts(SCHEMAS):
        if re.search(
            r"/properties/(created|time|timestamp|accepted|\w+_ts|\w*_time|last_active)$", at
        ):
            schema = part.get("anyOf", [part])[0]
            assert resolved(schema).get("format") == "date-time", at
    for operation in OPERATIONS.values():
        for parameter in operation.get("parameters", ()):
            if parameter["name"].endswith("_time"):
                assert parameter["schema"] == {"type": "string", "format": "date-time"}


def test_guarded_operations_have_their_headers() -> None:
    def headers(operation: str) -> set[str]:
        given = OPERATIONS[operation]["parameters"]
        return {one["name"] for one in given if one["in"] == "header"}

    for kind in ("stream", "consumer"):
        assert headers(f"put_{kind}") == {"If-Match", "If-None-Match"}
        assert headers(f"patch_{kind}") == headers(f"delete_{kind}") == {"If-Match"}


def test_a_body_has_one_form_and_so_has_an_answer_of_success() -> None:
    for name, operation in OPERATIONS.items():
        assert len(operation.get("requestBody", {}).get("content", {})) <= 1, name
        good = {status: one for status, one in operation["responses"].items() if status < "300"}
        kinds = {
            json.dumps([media["schema"] for media in one["content"].values()][-1])
            for one in good.values()
            if "content" in one
        }
        assert len(kinds) <= 1 or name == "publish_batch", name  # 207 has the results alone
        assert all(len(one.get("content", {})) <= 1 for one in good.values()) or name == (
            "snapshot_stream"  # its two types are both of bytes
        ), name


def test_a_message_is_read_as_bytes_or_as_json_by_an_operation_each() -> None:
    def media(operation: str) -> list[str]:
        return list(OPERATIONS[operation]["responses"]["200"]["content"])

    assert media("get_message") == ["application/octet-stream"]
    assert media("get_message_json") == ["application/json"]


def test_refusals_share_one_response_for_each_status() -> None:
    responses = DOCUMENT["components"]["responses"]
    for operation in OPERATIONS.values():
        for status, answer in operation["responses"].items():
            if status >= "400":
                assert answer["$ref"] == f"#/components/responses/Problem{status}"
                assert re.match(r"`\w+` \(\d+\): ", answer["description"])
    assert len(responses) < 25
    assert "Retry-After" in responses["Problem503"]["headers"]


def test_probes_need_no_token() -> None:
    for probe in ("livez", "readyz"):
        assert OPERATIONS[probe]["security"] == []
        assert "401" not in OPERATIONS[probe]["responses"]
    assert "security" not in OPERATIONS["metrics"]


def test_operations_have_unique_ids_and_every_tag_is_described() -> None:
    count = sum(len(item) for item in DOCUMENT["paths"].values())
    assert len(OPERATIONS) == count
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", each) for each in OPERATIONS)
    described = {tag["name"] for tag in DOCUMENT["tags"]}
    assert described == {tag for each in OPERATIONS.values() for tag in each["tags"]}


def test_a_package_named_after_the_document_is_not_the_sdks() -> None:
    package = DOCUMENT["info"]["title"].lower().replace(" ", "_") + "_client"
    assert package != "contrail_client"


def test_example_of_a_put_fits_any_name_in_the_path() -> None:
    for path, item in DOCUMENT["paths"].items():
        body = item.get("put", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None:
            name = body["schema"]["$ref"].rpartition("/")[2]
            examples = DOCUMENT["components"]["schemas"][name].get("examples", [])
            assert "name" not in body.get("example", examples[0] if examples else {}), path


def test_every_field_and_parameter_is_described() -> None:
    described = [
        (f"{name}.{field}", shown)
        for name, schema in DOCUMENT["components"]["schemas"].items()
        for field, shown in schema.get("properties", {}).items()
    ]
    described += [
        (f"{operation['operationId']}: {parameter['name']}", parameter)
        for item in DOCUMENT["paths"].values()
        for operation in item.values()
        for parameter in operation.get("parameters", ())
    ]
    assert len(described) > 400
    bare = [at for at, shown in described if not shown.get("description", "").endswith(".")]
    assert bare == []
