"""The application: routes of the service, OpenEnv's beside them, and the page.

OpenEnv's own application is under `/openenv`. The root is a superset that its validator, its clients and its containers
take as well: `/ws` speaks both forms (see `sockets`); `/reset` and `/health` answer OpenEnv's bodies; `/step` and
`/state` take the session's id in the body or the query; and what the service has no route for (`/schema`, `/metadata`,
`/mcp`) is answered by OpenEnv's application. The one difference: an observation is a text at the root's `/reset` and
`/step`, an object under `/openenv`, where every HTTP request is an episode of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import WebSocketRoute

from env.server.errors import ServiceError, first_line
from env.server.limits import LargestBody
from env.server.openenv_app import DESCRIPTION, openenv_application
from env.server.routes import page, service_routes
from env.server.service import IDLE_SECONDS, MOST_SESSIONS, Answer, Service
from env.server.sockets import Socket

SWEEP_SECONDS = 5.0


def create_application(
    answer: Answer | None = None,
    *,
    idle_seconds: float = IDLE_SECONDS,
    most_sessions: int = MOST_SESSIONS,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The application.

    Args:
        answer: plays for "adapter" in `/suggest`: name of the environment, observation -> the action's text.
        idle_seconds: after which a session that is not used ends.
        most_sessions: how many there may be at once, and as many again over OpenEnv.
        clock: seconds, from anywhere; tells how long a session was idle.
    """
    service = Service(answer, idle_seconds=idle_seconds, most_sessions=most_sessions, clock=clock)
    openenv = openenv_application(idle_seconds=idle_seconds, most_sessions=most_sessions)

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(service))
        async with openenv.router.lifespan_context(openenv):  # a mounted application's own is not run
            yield
        sweeping.cancel()
        service.close()

    application = FastAPI(
        title="Schedulers", description=DESCRIPTION, version="1.0.0", docs_url=None, redoc_url=None, lifespan=lifespan
    )
    application.state.service = service
    application.add_middleware(LargestBody)
    for each in (application, openenv):
        _answer_errors(each)
    application.include_router(service_routes(service))
    application.add_api_route("/", page, include_in_schema=False)
    application.router.routes.append(WebSocketRoute("/ws", Socket(service, openenv)))
    static = str(files("env.server").joinpath("static"))
    application.mount("/static", StaticFiles(directory=static))
    application.mount("/openenv", openenv)
    application.mount("", openenv)
    return application


def _answer_errors(application: FastAPI) -> None:
    """Every error as `{"error": "one line"}`."""

    @application.exception_handler(ServiceError)
    async def refused(request: Request, error: ServiceError) -> JSONResponse:
        headers = {"retry-after": "5"} if error.status == 503 else None
        return JSONResponse({"error": str(error)}, error.status, headers)

    @application.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            {"error": f"{request.method} {request.url.path}: {error.detail}"}, error.status_code, error.headers
        )

    @application.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors: list[Any] = list(error.errors())
        malformed = errors[0]["type"] == "json_invalid"
        line = "body: expected JSON, found something else" if malformed else first_line(errors)
        if errors[0]["loc"] == ("body",) and "json" not in (kind := request.headers.get("content-type", "none")):
            line = f"content-type: expected application/json, found {kind}"
        return JSONResponse({"error": " ".join(line.split())}, 400 if malformed else 422)


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        service.sessions.sweep()
