"""Server of the viewer: the page's files, and its data as JSON. No request writes anything.

Runs hold private prompts, so it listens on loopback alone. A foreign page that resolves its own name to 127.0.0.1 (DNS
rebinding) is refused by the Host header.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web

from bebop.errors import UserError
from bebop.trajectory_db.reader import Trajectories
from bebop.view.folders import HOST, Folder, answer, dumps, facets, listing, siblings

PAGE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
HOSTS = (HOST, "localhost")
HEADERS = {
    # Nothing is loaded from elsewhere, and the page has no inline scripts. plotly.js writes style elements.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FOLDERS = web.AppKey("folders", Sequence[Folder])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(folders: Sequence[Folder]) -> web.Application:
    """Return the server of some runs, which the page identifies by their index in ``folders``."""
    app = web.Application(middlewares=[_guarded])
    app[FOLDERS] = folders
    run = "/api/runs/{run:[0-9]{1,4}}"
    app.add_routes(
        [
            web.get("/", _file),
            web.get("/page/{name:[a-z_]+[.](?:js|css)}", _file),
            web.get("/plotly.js", _plotly),
            web.get("/api/runs", _runs),
            web.get("/api/state", _state),
            web.get(f"{run}/curves", _curves),
            web.get(f"{run}/alarms", _alarms),
            web.get(f"{run}/alarms/{{step:[0-9]{{1,18}}}}", _alarm),
            web.get(f"{run}/facets", _facets),
            web.get(f"{run}/answers", _answers),
            web.get(f"{run}/answers/{{answer:[0-9]{{1,18}}}}", _answer),
            web.get(f"{run}/answers/{{answer:[0-9]{{1,18}}}}/siblings", _siblings),
        ]
    )
    return app


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign hosts, return errors as JSON, and add headers to every response."""
    host = request.host.rpartition(":")[0] if ":" in request.host else request.host
    if host not in HOSTS:
        response: web.StreamResponse = _json({"error": f"host {host[:80]!r} is not served here"}, 403)
    else:
        try:
            response = await handler(request)
        except UserError as error:
            response = _json({"error": " ".join(str(error).split())}, 400)
        except web.HTTPException as error:
            response = _json({"error": f"{error.status} {error.reason}: {request.path[:200]}"}, error.status)
    response.headers.update(HEADERS)
    return response


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(text=dumps(value), content_type="application/json", status=status)


async def _file(request: web.Request) -> web.StreamResponse:
    path = PAGE / request.match_info.get("name", "index.html")
    if not path.is_file():
        raise web.HTTPNotFound
    return web.Response(text=path.read_text(encoding="utf-8"), content_type=KINDS[path.suffix], charset="utf-8")


async def _plotly(request: web.Request) -> web.StreamResponse:
    return web.Response(text=await asyncio.to_thread(_plotly_source), content_type=KINDS[".js"], charset="utf-8")


@cache
def _plotly_source() -> str:
    from plotly.offline import get_plotlyjs  # on demand: a list of completions needs no plots

    source: str = get_plotlyjs()
    return source


async def _runs(request: web.Request) -> web.StreamResponse:
    folders = request.app[FOLDERS]
    systems = await asyncio.to_thread(lambda: [str(f.setting("decoding", "system") or "") for f in folders])
    listed = [{"name": f.name, "path": str(f.path), "system": s} for f, s in zip(folders, systems, strict=True)]
    return _json(await _with_counts(request, listed))


async def _state(request: web.Request) -> web.StreamResponse:
    return _json(await _with_counts(request, [{} for _ in request.app[FOLDERS]]))


async def _with_counts(request: web.Request, rows: list[dict[str, Any]]) -> dict[str, Any]:
    counted = await asyncio.to_thread(lambda: [folder.counts() for folder in request.app[FOLDERS]])
    return {"runs": [row | counts for row, counts in zip(rows, counted, strict=True)]}


async def _curves(request: web.Request) -> web.StreamResponse:
    return _json(await asyncio.to_thread(_folder(request).curves))


async def _alarms(request: web.Request) -> web.StreamResponse:
    return _json({"alarms": await asyncio.to_thread(_folder(request).alarms)})


async def _alarm(request: web.Request) -> web.StreamResponse:
    """Return the tokens behind an alarm as JSON."""
    folder, step = _folder(request), int(request.match_info["step"])
    return _json(await asyncio.to_thread(_explained, folder, step))


def _explained(folder: Folder, step: int) -> dict[str, Any]:
    from bebop.view.drift_tokens import explain  # on demand: the monitor takes a while to import

    return explain(folder.path, step)


async def _facets(request: web.Request) -> web.StreamResponse:
    return _json(await _asked(request, facets, {"words": {}, "ranges": {}}))


async def _answers(request: web.Request) -> web.StreamResponse:
    if len(request.query) != len(set(request.query)):
        raise UserError("a filter is given twice: give each once")
    asked = dict(request.query)
    return _json(await _asked(request, lambda store: listing(store, asked), {"total": 0, "offset": 0, "rows": []}))


async def _answer(request: web.Request) -> web.StreamResponse:
    found = await _asked(request, lambda store: answer(store, int(request.match_info["answer"])), None)
    if found is None:
        raise web.HTTPNotFound
    return _json(found)


async def _siblings(request: web.Request) -> web.StreamResponse:
    """Return the completions of the same prompt in every run."""
    number = int(request.match_info["answer"])
    query = "SELECT prompt, prompts.text AS text, gold FROM answers JOIN prompts USING (prompt) WHERE id = ?"
    prompts = await _asked(request, lambda store: store.query(query, (number,)), [])
    if not prompts:
        raise web.HTTPNotFound
    found: list[dict[str, Any]] = []
    number, text, gold = prompts[0]
    folders = request.app[FOLDERS]
    for run, folder in enumerate(folders):
        rows = await asyncio.to_thread(_read, folder, lambda store: siblings(store, number, text), [])
        found += [{"run": run} | row for row in rows]
    return _json({"prompt": number, "text": text, "gold": gold, "answers": found})


def _folder(request: web.Request) -> Folder:
    number, folders = int(request.match_info["run"]), request.app[FOLDERS]
    if number >= len(folders):
        raise web.HTTPNotFound
    return folders[number]


async def _asked(request: web.Request, ask: Callable[[Trajectories], Any], nothing: Any) -> Any:
    """Return the result of ``ask`` for the request's run, or ``nothing`` while the run has no completions."""
    return await asyncio.to_thread(_read, _folder(request), ask, nothing)


def _read(folder: Folder, ask: Callable[[Trajectories], Any], nothing: Any) -> Any:
    with folder.open() as store:
        return nothing if store is None else ask(store)
