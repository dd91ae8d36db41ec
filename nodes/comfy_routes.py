"""What our panels ask of the server: ``models``, ``download`` and ``compile`` for a browser, and what is in memory.

A page of another origin can make the user's browser send requests here. So a request is answered only
if the browser says that it comes from ComfyUI's own page, and only if it has exactly the fields of its
route. It names a model set that is in the list; no path, address or option is taken from it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import folder_paths
from aiohttp import web
from server import PromptServer

from ..host.contract import ContractError
from ..host.describe import describe
from ..host.download import LICENCE_NOTICE, NAME, DownloadRequest, offer
from ..host.jobs import Jobs, JobState, compile_job, download_job
from ..host.published import PUBLISHED_REPOSITORY
from .comfy import FOLDER, model_set, model_sets
from .comfy_events import memory

EVENT = "coreai_rgba.models"
"""Sent to every browser with the ``JobState`` of the job that runs or has just ended."""
LARGEST_BODY = 1024

Values = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.Response]]


class RefusedError(Exception):
    """A request that our panels do not make; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def _tell(state: JobState) -> None:
    PromptServer.instance.send_sync(EVENT, asdict(state))


jobs = Jobs(_tell)
offers: dict[str, DownloadRequest] = {}
"""Requests whose licence was sent to the browser, by the token that went with it. No other is carried out."""


async def get_models() -> Values:
    """The names of the model sets, which is quick however large they are; the published one; the job."""
    names, published = await asyncio.to_thread(lambda: (list(model_sets()), _published()))
    return {"names": names, "published": published, "job": jobs.state and asdict(jobs.state)}


async def get_model(name: str) -> Values:
    """All about one, and the lines that ``coreai-rgba models`` prints of it.

    A large one is hashed when it is first looked at, which takes a minute.
    """
    found = await asyncio.to_thread(lambda: describe(name, model_set(name)))
    return {**found.to_json(), "lines": list(found.lines())}


async def get_licence(name: str) -> Values:
    """The licence of the published set, with the token that a download needs."""
    if name != NAME:
        raise ContractError(f"{name!r} is not published: {NAME} is")
    found = await asyncio.to_thread(lambda: offer(_request()))
    offers[found.token] = found.request
    return {"licence": found.licence, "token": found.token, "size": found.size, "address": found.address}


async def get_memory() -> Values:
    """The loaded bundles, for a page that was opened after they were loaded."""
    return memory()


async def post_download(name: str, accept_license: bool, token: str) -> Values:
    """Begin to download what was offered; ``token`` is the one that came with its licence."""
    request = offers.get(token)
    if not accept_license or request is None or request.name != name:
        raise RefusedError(403, "nothing is downloaded before its licence was shown and accepted")
    jobs.start(download_job(replace(request, accept_license=True)))
    return {}


async def post_compile(name: str) -> Values:
    """Begin to compile a set; how it goes is told by ``EVENT``, as it is of a download."""
    jobs.start(compile_job(name, await asyncio.to_thread(model_set, name)))
    return {}


async def post_cancel() -> Values:
    """Tell the job that runs, if one does, to stop."""
    jobs.cancel()
    return {}


def _request() -> DownloadRequest:
    """Of the published set, into the folder where it is or was begun, else the first."""
    requests = [DownloadRequest(Path(folder), NAME) for folder in folder_paths.get_folder_paths(FOLDER)]
    return next((request for request in requests if request.path.exists() or _is_begun(request)), requests[0])


def _is_begun(request: DownloadRequest) -> bool:
    return not request.path.is_symlink() and request.staging.is_dir()


def _published() -> Values:
    request = _request()
    about = {"name": NAME, "repository": PUBLISHED_REPOSITORY, "licence": LICENCE_NOTICE}
    return {**about, "folder": str(request.folder), "begun": _is_begun(request)}


def _answering(act: Callable[..., Awaitable[Values]], fields: dict[str, type]) -> Handler:
    """``act`` on the fields of a request from ComfyUI's own page; what it cannot do is answered with ``error``."""

    async def handle(request: web.Request) -> web.Response:
        try:
            _check_origin(request)
            values = dict(request.query) if request.method == "GET" else await _body(request)
            if {name: type(value) for name, value in values.items()} != fields:
                raise RefusedError(400, f"this route takes {', '.join(fields) or 'no fields'} and nothing else")
            return web.json_response(await act(**values))
        except RefusedError as error:
            return web.json_response({"error": str(error)}, status=error.status)
        except ContractError as error:
            return web.json_response({"error": str(error)}, status=400)

    return handle


def _check_origin(request: web.Request) -> None:
    """Raise unless the browser says that the page is of this origin.

    ``Sec-Fetch-Site`` says so, but only over https and on this machine; else ``Origin``, which each
    POST has, and ``Referer`` name the page's.
    """
    site, host = request.headers.get("Sec-Fetch-Site"), request.headers.get("Host", "")
    page = request.headers.get("Origin") or request.headers.get("Referer")
    origin = page and page.partition("://")[2].partition("/")[0]
    if site not in (None, "same-origin") or (site is None and not origin) or (page and origin != host):
        raise RefusedError(403, "only ComfyUI's own page may ask for this")


async def _body(request: web.Request) -> Values:
    if request.content_type != "application/json":
        raise RefusedError(415, "this route takes JSON")
    body = b""
    async for piece in request.content.iter_chunked(LARGEST_BODY):
        body += piece
        if len(body) > LARGEST_BODY:
            raise RefusedError(413, f"this route takes at most {LARGEST_BODY} bytes")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"this is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise RefusedError(400, "this is no JSON object")
    return values


def add_routes() -> None:
    """Add them to ComfyUI's, which it does once more itself with ``/api`` before each."""
    name: dict[str, type] = {"name": str}
    routes = PromptServer.instance.routes
    routes.get("/coreai_rgba/models")(_answering(get_models, {}))
    routes.get("/coreai_rgba/model")(_answering(get_model, name))
    routes.get("/coreai_rgba/licence")(_answering(get_licence, name))
    routes.get("/coreai_rgba/memory")(_answering(get_memory, {}))
    routes.post("/coreai_rgba/download")(_answering(post_download, name | {"accept_license": bool, "token": str}))
    routes.post("/coreai_rgba/compile")(_answering(post_compile, name))
    routes.post("/coreai_rgba/cancel")(_answering(post_cancel, {}))
