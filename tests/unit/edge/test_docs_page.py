"""The page at /docs is whole: what it shows comes with it, or from the document beside it."""

import asyncio
import re

from contrail_edge.openapi.docs_page import docs_page
from tests.unit.edge.edge_rig import Edge

PAGE = docs_page().decode()


def test_page_loads_nothing_from_elsewhere() -> None:
    assert not re.search(r"<(script|img|iframe|link)[^>]* (src|href)=", PAGE)
    assert "@import" not in PAGE
    assert 'url: "/openapi.json"' in PAGE
    answer = asyncio.run(Edge().call("GET", "/docs"))
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self';")
    assert not re.search(r"https?:|\*", policy)


def test_scripts_and_styles_end_where_they_should() -> None:
    """A browser ends a script at the first end tag, and never inside what looks like a comment."""
    assert len(re.findall("<!--", PAGE)) == 0
    assert len(re.findall("</script", PAGE, re.IGNORECASE)) == 2
    assert len(re.findall("</style", PAGE, re.IGNORECASE)) == 2


def test_page_has_search_and_shows_fields() -> None:
    assert "plugins: [search]" in PAGE
    assert "filter: true" in PAGE
    assert 'defaultModelRendering: "model"' in PAGE
    assert "responseInterceptor: prepare" in PAGE
    assert 'paths["/v1/subjects/{subject}/messages"]' in PAGE
    assert ('placeholder:"Search"' in PAGE, "Filter by tag" in PAGE) == (True, False)
