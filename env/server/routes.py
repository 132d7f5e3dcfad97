"""The service's routes."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Body, Query
from fastapi.responses import HTMLResponse, JSONResponse

from env.server.requests import ResetRequest, SessionStepRequest, StepRequest, SuggestRequest
from env.server.service import Service

PAGE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The page runs its own files only and talks to this host only."""


async def page() -> HTMLResponse:
    """The page to watch an episode."""
    text = files("env.server").joinpath("static", "index.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"content-security-policy": PAGE_POLICY})


def service_routes(service: Service) -> APIRouter:
    """Routes that answer from a service."""
    router = APIRouter(default_response_class=JSONResponse)

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "healthy", "sessions": len(service.sessions)})

    @router.get("/tasks")
    async def tasks() -> JSONResponse:
        return JSONResponse(service.tasks())

    @router.post("/reset")
    async def reset(request: Annotated[ResetRequest, Body(default_factory=ResetRequest)]) -> JSONResponse:
        return JSONResponse(await service.reset(request))

    @router.post("/step/{session_id}")
    async def step(session_id: str, request: StepRequest) -> JSONResponse:
        return JSONResponse(await service.step(session_id, request.command, view=request.view))

    @router.post("/step")
    async def step_of(request: SessionStepRequest) -> JSONResponse:
        return JSONResponse(await service.step(request.session_id, request.text, view=request.view))

    @router.get("/state/{session_id}")
    async def state(session_id: str, view: bool = True) -> JSONResponse:
        return JSONResponse(await service.state(session_id, view=view))

    @router.get("/state")
    async def state_of(session_id: Annotated[str, Query()], view: bool = True) -> JSONResponse:
        return JSONResponse(await service.state(session_id, view=view))

    @router.post("/suggest/{session_id}")
    async def suggest(session_id: str, request: SuggestRequest) -> JSONResponse:
        return JSONResponse(await service.suggest(session_id, request.policy))

    @router.get("/worth/{session_id}")
    async def worth(session_id: str) -> JSONResponse:
        return JSONResponse(await service.worth(session_id))

    @router.get("/replay/{session_id}")
    async def replay(session_id: str) -> JSONResponse:
        return JSONResponse(service.replay(session_id))

    @router.post("/delete/{session_id}")
    @router.delete("/session/{session_id}")
    async def delete(session_id: str) -> JSONResponse:
        return JSONResponse(service.delete(session_id))

    return router
