"""The page at ``/docs``: Swagger UI over the OpenAPI document, in one file."""

from importlib.metadata import distribution
from pathlib import Path
from typing import Final

_PACKAGE: Final = "fastapi-offline"
"""The package with the files of Swagger UI. As a dependency its version is pinned and hashed."""
_FILES: Final = "fastapi_offline/static"

_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Contrail HTTP API</title>
<style>%(style)s</style>
<style>body { margin: 0; } .swagger-ui .information-container { padding-bottom: 0; }</style>
<main id="docs">Loading ...</main>
<script>%(script)s</script>
<script>
// By default the filter only searches tags. Here an operation must contain every word.
const search = () => ({ fn: { opsFilter: (tags, phrase) => {
  const words = phrase.toLowerCase().split(/\\s+/);
  const says = operation => [
    operation.get("method"), operation.get("path"),
    ...["tags", "operationId", "summary", "description"].map(
      name => operation.getIn(["operation", name])),
  ].join(" ").toLowerCase();
  const matches = operation => words.every(word => says(operation).includes(word));
  return tags
    .map(tag => tag.update("operations", operations => operations.filter(matches)))
    .filter(tag => tag.get("operations").size > 0);
} } });
// Swagger UI fills in all examples, also of optional parameters: a first publish would be refused
// because of an expected sequence. So examples of optional parameters move to the description.
const leaveOut = parameter => {
  const example = parameter.example ?? parameter.schema?.examples?.[0];
  if (parameter.required || example === undefined) return;
  delete parameter.example;
  delete parameter.schema.examples;
  parameter.description = `${parameter.description ?? ""}\n\n*Example*: ${"`"}${example}${"`"}`;
};
const prepare = answer => {
  if (!answer.ok || new URL(answer.url, location).pathname !== "/openapi.json") return answer;
  const described = JSON.parse(answer.text);
  Object.values(described.components?.parameters ?? {}).forEach(leaveOut);
  // For any bytes the page shows no field to type in, so it offers text for a payload.
  const publish = described.paths["/v1/subjects/{subject}/messages"]?.post;
  if (publish) publish.requestBody.content = {
    "text/plain": {schema: {type: "string"}, example: "hello"}, ...publish.requestBody.content };
  for (const path of Object.values(described.paths))
    for (const operation of Object.values(path)) (operation.parameters ?? []).forEach(leaveOut);
  answer.text = JSON.stringify(described);
  return answer;
};
// "Try it out" shows the fields of the body first; switch to its example, which can be edited.
document.addEventListener("click", event => {
  const block = event.target.closest(".try-out__btn") && event.target.closest(".opblock");
  if (block) setTimeout(() => block.querySelector("[data-name=example]")?.click());
});
SwaggerUIBundle({
  url: "/openapi.json",
  responseInterceptor: prepare,
  dom_id: "#docs",
  plugins: [search],
  filter: true,
  deepLinking: true,
  defaultModelRendering: "model",
  defaultModelExpandDepth: 2,
  defaultModelsExpandDepth: 0,
  persistAuthorization: false,
});
</script>
</html>
"""


def docs_page() -> bytes:
    """Return the page with its scripts and styles. It only loads the document.

    Reads the files (1.7 MB) each time, so that they do not stay in memory.
    """
    return (
        _PAGE
        % {
            "style": _file("swagger-ui.css"),
            # This would begin an HTML comment and hide the end of the script from the browser.
            "script": _file("swagger-ui-bundle.js")
            .replace("<!--", r"<\x21--")
            .replace("Filter by tag", "Search"),  # see `search` above
        }
    ).encode()


def _file(name: str) -> str:
    path = distribution(_PACKAGE).locate_file(f"{_FILES}/{name}")
    return Path(str(path)).read_text(encoding="utf-8")
