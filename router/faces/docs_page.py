"""``/docs``: the OpenAPI description for readers, without files from elsewhere."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import HTMLResponse

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Holdfast APIs</title><style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222 }
summary { cursor: pointer; padding: .3rem 0 } code { font-size: 14px } b { display: inline-block; width: 4.5rem }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto } p { margin: .2rem 0 }
</style></head><body><h1>Holdfast APIs</h1>
<p>The description is at <a href="/openapi.json">/openapi.json</a>.</p><main></main><script>
const text = (tag, content) => Object.assign(document.createElement(tag), { textContent: content });
fetch("/openapi.json").then((answer) => answer.json()).then((api) => {
  const resolve = (part) => part && part.$ref ? api.components.schemas[part.$ref.split("/").pop()] : part;
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, call] of Object.entries(methods)) {
    const entry = document.createElement("details"), head = document.createElement("summary");
    head.append(text("b", method.toUpperCase()), text("code", path));
    entry.append(head, text("p", call.description || call.summary || ""));
    const given = (call.parameters || []).map((p) => `${p.name} (${p.in})${p.required ? ", required" : ""}`);
    if (given.length) entry.append(text("p", "Parameters: " + given.join("; ")));
    const body = call.requestBody && resolve(call.requestBody.content["application/json"].schema);
    if (body) entry.append(text("pre", JSON.stringify(body.properties || body, null, 2)));
    document.querySelector("main").append(entry);
  }
});
</script></body></html>
"""


def docs_routes() -> APIRouter:
    """The page."""
    routes = APIRouter()

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(PAGE)

    return routes
