"""``python -m contrail_serve.openapi_export [--check] [PATH]``: write or compare the document."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final, cast

import contrail_api
import contrail_gateway
from contrail_edge.app import build_app
from contrail_edge.http.settings import EdgeSettings
from contrail_link.contract import StorageLink

DEFAULT_PATH: Final = Path("openapi/openapi.json")


def document_text() -> str:
    """Return the OpenAPI document of the public interface in the form of the repository."""
    settings = EdgeSettings(ack_keys=(bytes(32),))
    # Routes only hold the link; none is called here.
    link = cast(StorageLink, object())
    app = build_app(
        [contrail_api.edge_module(link, settings), contrail_gateway.edge_module(link, settings)],
        settings,
    )
    document = asyncio.run(app.document())
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write the document; with ``--check`` compare it, and return 1 if it differs."""
    check = "--check" in arguments
    paths = [Path(one) for one in arguments if one != "--check"]
    path = paths[0] if paths else DEFAULT_PATH
    text = document_text()
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path} is out of date; run `make openapi`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
