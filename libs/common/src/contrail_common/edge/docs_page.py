"""The page at ``/docs``: the OpenAPI document, readable without anything from elsewhere."""

from typing import Final

DOCS_PAGE: Final = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Contrail API</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
  summary { cursor: pointer; padding: .3rem 0; }
  code, pre { font: 14px/1.45 ui-monospace, monospace; }
  pre { background: #8881; overflow-x: auto; padding: .6rem; }
  table { border-collapse: collapse; width: 100%; }
  td { border-top: 1px solid #8884; padding: .25rem .5rem; vertical-align: top; }
  .method { display: inline-block; font-weight: 600; width: 4.5rem; }
  :root { color-scheme: light dark; }
</style>
<h1>Contrail API</h1>
<p>The machine-readable form of this page is <a href="/openapi.json">/openapi.json</a>.</p>
<main>Loading ...</main>
<script>
const main = document.querySelector("main");
const element = (name, text, ...children) => {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
};
const rows = (title, entries) => entries.length === 0 ? [] : [
  element("h4", title),
  element("table", "", ...entries.map(cells =>
    element("tr", "", ...cells.map(cell => element("td", "", cell))))),
];
const code = text => element("code", text);
const examples = content => Object.entries(content ?? {}).flatMap(([type, media]) => [
  element("p", type),
  ...(media.example === undefined ? [] :
    [element("pre", typeof media.example === "string"
      ? media.example : JSON.stringify(media.example, null, 2))]),
]);
const operation = (method, path, spec) => {
  const name = element("span", method.toUpperCase());
  name.className = "method";
  const parameters = (spec.parameters ?? []).map(one =>
    [code(one.name), one.in, one.description ?? ""]);
  const answers = Object.entries(spec.responses).map(([status, one]) =>
    [code(status), one.description]);
  const good = Object.entries(spec.responses).filter(([status]) => status < "300");
  return element("details", "",
    element("summary", "", name, code(path), " ", spec.summary ?? ""),
    element("p", spec.description ?? ""),
    ...rows("Parameters", parameters),
    ...(spec.requestBody
      ? [element("h4", "Request body"), ...examples(spec.requestBody.content)] : []),
    ...rows("Answers", answers),
    ...good.flatMap(([status, one]) => examples(one.content)));
};
fetch("/openapi.json").then(answer => answer.json()).then(document => {
  const byTag = new Map();
  for (const [path, item] of Object.entries(document.paths))
    for (const [method, spec] of Object.entries(item)) {
      const tag = spec.tags?.[0] ?? "other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), operation(method, path, spec)]);
    }
  main.replaceChildren(...[...byTag].flatMap(([tag, operations]) =>
    [element("h2", tag), ...operations]));
}).catch(error => main.replaceChildren(element("p", `Not available: ${error}`)));
</script>
</html>
"""
