"""Assemble the master from its parts as an ASGI application."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import mlbench_core
from mlbench_core.addresses import is_loopback
from mlbench_core.client.masters import KEY_VARIABLE
from mlbench_core.errors import ConfigurationError
from mlbench_core.paths import user_folder
from mlbench_master.access.credentials import Access, make_private
from mlbench_master.access.guard import GuardMiddleware, refuse, wants_page
from mlbench_master.access.login import add_login
from mlbench_master.access.proxies import RootPathMiddleware, check_root_path
from mlbench_master.api.openapi import set_description
from mlbench_master.api.routes import router
from mlbench_master.connection_limits import max_connections
from mlbench_master.database.store import Store
from mlbench_master.database.writer import MetricWriter
from mlbench_master.engines import Engine, EngineError, make_engine
from mlbench_master.events import EventBus, TooManyStreamsError
from mlbench_master.runs.lease import Lease
from mlbench_master.runs.scheduler import Scheduler
from mlbench_master.web import make_pages
from mlbench_master.web.render import error_page

__all__ = ["create_app"]

_log = logging.getLogger(__name__)
_FORMAT_SUFFIX = re.compile(r"(/api/(?:runs|pods|metrics)(?:/[^/]+)?)\.(json|zip|csv)/?")
_WITH_FINAL_SLASH = ("/api/", "/runs", "/workers/", "/login", "/logout", "/docs")


def create_app(
    database_url: str | None = None,
    data_dir: str | Path | None = None,
    token: str | None = None,
    engine: Engine | None = None,
    master_url: str = "http://127.0.0.1:5080",
    root_path: str = "",
) -> FastAPI:
    """Make the master as an ASGI application.

    Nothing runs until the application's lifespan starts. When the lifespan ends, runs continue
    without the master.

    Args:
        database_url: SQLAlchemy URL; by default ``master.db`` in the data folder.
        data_dir: Folder for logs and states; by default ``master`` in the user's folder.
        token: Secret that every request must carry. With None, every user of this machine has
            access, and only requests to a loopback name are answered.
        engine: The engine that starts runs; by default it starts processes on this machine.
        master_url: The URL under which workers reach this master.
        root_path: The path below which a proxy serves it, see :mod:`mlbench_master.access.proxies`.

    Returns:
        The application; ``app.state`` has ``store``, ``scheduler``, ``engine``, ``events``,
        ``access``.

    Raises:
        ConfigurationError: The database cannot be opened, another master uses it, or other users
            can read the data folder.
        MasterTokenError: The token has characters that a request cannot carry. The error is also a
            ``ValueError``.
    """
    if data_dir is None:
        folder = user_folder("master")
    else:
        folder = Path(data_dir).expanduser().absolute()
    # The folder holds logs, and jobs with the token in their environment.
    make_private(folder)
    access = Access(folder, token)
    if database_url is None:
        # SQLite gives its other files the mode of this one.
        (folder / "master.db").touch(mode=0o600)
    store = Store(database_url or f"sqlite:///{folder / 'master.db'}")
    writer = MetricWriter(store)
    engine = engine or make_engine("local", folder)
    # Event streams stay open, and they must leave connections for other requests.
    events = EventBus(max_streams=min(256, max_connections() // 2))
    _check_engine(store, engine)
    # Before a run is touched: another master may be looking after them.
    lease = Lease(store)
    lease.acquire()
    variables = _worker_variables(master_url, access)
    scheduler = Scheduler(store, engine, events, variables, lease=lease)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        try:
            yield
        finally:
            events.close()  # otherwise the server would wait for open dashboards
            # close() waits for the scheduler's thread, which would block the event loop.
            await anyio.to_thread.run_sync(scheduler.close)
            engine.close()
            await anyio.to_thread.run_sync(writer.close)
            store.close()

    app = FastAPI(
        title="MLBench master",
        version=mlbench_core.__version__,
        lifespan=lifespan,
        # _PathMiddleware adds a missing final slash without a redirect.
        redirect_slashes=False,
        # FastAPI's own pages load scripts from another server, which could start commands here.
        docs_url=None,
        redoc_url=None,
        # login.py serves the description, with the root path.
        openapi_url=None,
    )
    app.state.store = store
    app.state.scheduler = scheduler
    app.state.engine = engine
    app.state.events = events
    app.state.writer = writer
    app.state.access = access
    app.include_router(router)
    app.include_router(make_pages())
    add_login(app, access)
    static = Path(__file__).parent / "web" / "static"
    app.mount("/static", StaticFiles(directory=static), name="static")
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(SQLAlchemyError, _database_error)
    app.add_exception_handler(TooManyStreamsError, _too_many_streams)
    app.add_exception_handler(EngineError, _engine_error)
    set_description(app)
    app.add_middleware(GuardMiddleware, access=access)
    # The middleware that is added last runs first, so the guard sees only normalized paths.
    app.add_middleware(_PathMiddleware)
    app.add_middleware(RootPathMiddleware, root_path=check_root_path(root_path))
    return app


def _check_engine(store: Store, engine: Engine) -> None:
    """Refuse to look after runs that another engine has started and that may still be running.

    Raises:
        ConfigurationError: There are such runs; the message names one of them and its engine.
    """
    for run in store.runs("started"):
        started_by = (run.job_id or engine.name).rpartition("-")[0]
        if started_by != engine.name:
            raise ConfigurationError(
                f"run {run.name!r} was started by the engine {started_by} and has not ended: "
                f"start the master with --engine {started_by} until it has, "
                "or choose another folder with --data-dir"
            )


def _worker_variables(master_url: str, access: Access) -> dict[str, str]:
    """Return the environment variables by which workers find the master and may use it."""
    variables = {"MLBENCH_MASTER_URL": master_url}
    if access.token:
        variables["MLBENCH_TOKEN"] = access.token
        # The token is for this master alone, not for a program that has its port after its end.
        # Behind a name there may be a proxy, whose address the master cannot prove.
        if is_loopback(urlsplit(master_url).hostname or ""):
            variables[KEY_VARIABLE] = access.key
    return variables


class _PathMiddleware:
    """A middleware that normalizes paths and methods.

    It adds a missing final slash, turns ``/api/metrics/1.zip`` into a path and ``format=zip``, and
    HEAD into GET without the body, so that all paths of GET answer it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            suffix = _FORMAT_SUFFIX.fullmatch(path)
            if suffix is not None:
                path = suffix[1]
                query = [b"format=" + suffix[2].encode()]
                if scope["query_string"]:
                    query.insert(0, scope["query_string"])
                scope = {**scope, "query_string": b"&".join(query)}
            if not path.endswith("/") and path.startswith(_WITH_FINAL_SLASH):
                path += "/"
                scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "replace")}
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET", "is_head": True}
                await _answer_head(self._app, scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the header of the answer to a GET, without the body, which may be an endless stream."""
    is_sent = False

    async def send_header(message: Message) -> None:
        nonlocal is_sent
        if message["type"] == "http.response.start":
            await send(message)
        elif not is_sent:
            is_sent = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def disconnect() -> Message:
        # An answer in pieces ends when its client has gone.
        while not is_sent:
            message = await receive()
            if message["type"] != "http.disconnect" or not is_sent:
                return message
        return {"type": "http.disconnect"}

    await app(scope, disconnect, send_header)


def _error(
    request: Request, status: int, message: str, headers: dict[str, str] | None = None
) -> Response:
    """Return an error as JSON, or as a page if somebody has opened a wrong address in a browser."""
    if wants_page(request.url.path, request.headers):
        return error_page(request, status, message, headers)
    return refuse(status, message, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    return _error(request, error.status_code, str(error.detail), headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of a path; Starlette knows only those of one of its routes."""
    # For the routes, the word "import" in a path could be the id of a run.
    described = request.app.openapi()["paths"].get(request.url.path)
    if described is not None:
        methods = set(map(str.upper, described))
    else:
        methods = set()
        for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"):
            scope = {**request.scope, "method": method}
            if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
                methods.add(method)
        # Files below /static do not have routes, and allow only reading.
        if not methods:
            methods = {"GET"}
    if "GET" in methods:
        methods.add("HEAD")
    return sorted(methods)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = []
    for item in error.errors():
        # The first part is "path" or "query".
        field = ".".join(map(str, item["loc"][1:]))
        parts.append(f"{field}: {item['msg']}")
    return _error(request, 400, "; ".join(parts))


async def _database_error(request: Request, error: Exception) -> Response:
    _log.error("the database failed: %s", error)
    reason = str(getattr(error, "orig", None) or error).splitlines()[0]
    return _error(request, 503, f"the database failed: {reason}; try again", {"Retry-After": "1"})


async def _engine_error(request: Request, error: Exception) -> Response:
    return _error(request, 503, str(error), {"Retry-After": "10"})


async def _too_many_streams(request: Request, error: Exception) -> Response:
    return _error(request, 503, str(error), {"Retry-After": "10"})
