"""The AsyncAPI document says what the code does, and is what the repository holds."""

import os
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from contrail_gateway.asyncapi import document
from contrail_gateway.core.frames import OPERATIONS

KEPT = Path(__file__).parents[3] / "openapi" / "asyncapi.yaml"
UPDATE = "CONTRAIL_UPDATE_ASYNCAPI"


class Readable(yaml.SafeDumper):
    """Writes texts of several lines as such."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


Readable.add_representer(str, Readable.represent_str)


def messages_of(operation: str) -> list[dict[str, Any]]:
    made = document()
    names = [one["$ref"].rpartition("/")[2] for one in made["operations"][operation]["messages"]]
    return [made["components"]["messages"][name] for name in names]


def test_kept_document_is_what_the_code_makes() -> None:
    if os.environ.get(UPDATE):
        text = yaml.dump(document(), Dumper=Readable, sort_keys=False, allow_unicode=True)
        KEPT.write_text(text, encoding="utf-8")
    assert yaml.safe_load(KEPT.read_text(encoding="utf-8")) == document(), f"run with {UPDATE}=1"


def test_every_operation_of_a_client_is_described() -> None:
    described = [message["name"] for message in messages_of("fromClient")]
    assert sorted(described) == sorted(OPERATIONS)


def test_every_schema_is_valid_and_every_reference_leads_somewhere() -> None:
    made = document()
    for schema in made["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [one for each in value.values() for one in references(each)]
        if isinstance(value, list):
            return [one for each in value for one in references(each)]
        return []

    for reference in references(made):
        found = made
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_every_frame_is_identified_by_its_op() -> None:
    made = document()
    for message in (*messages_of("fromClient"), *messages_of("fromServer")):
        schema = made["components"]["schemas"][message["payload"]["$ref"].rpartition("/")[2]]
        assert schema["properties"]["op"]["enum"] == [message["name"]]
        assert "op" in schema["required"]
