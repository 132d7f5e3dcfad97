"""`/ws`: an episode over one connection, in the service's own form or in OpenEnv's.

The first message decides. A message with `data` in it, or one that is no reset, is OpenEnv's, and its own application
answers from then on. Otherwise every message is answered by the object that the route of the same name gives:

    {"type": "reset", "task": "task1_chain"}      {"type": "step", "command": "..."}      {"type": "state"}
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from env.server.errors import ServiceError
from env.server.requests import ResetRequest, StepRequest, read
from env.server.service import Service

WENT_IDLE = 1001


class Socket:
    """The endpoint.

    Args:
        service: answers the service's own form.
        openenv: answers OpenEnv's.
    """

    def __init__(self, service: Service, openenv: ASGIApp) -> None:
        self.service = service
        self.openenv = openenv

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        first = await self._next(websocket)
        if first is None:
            return
        if _is_openenv(first):
            await self._hand_over(scope, first, receive, send)
        else:
            await self._serve(websocket, first)

    async def _next(self, websocket: WebSocket) -> Message | None:
        """The next message, or None when the client has gone or was silent for too long."""
        try:
            message = await asyncio.wait_for(websocket.receive(), self.service.sessions.idle_seconds)
        except TimeoutError:
            await websocket.close(WENT_IDLE)
            return None
        return message if message["type"] == "websocket.receive" else None

    async def _hand_over(self, scope: Scope, first: Message, receive: Receive, send: Send) -> None:
        waiting: list[Message] = [first, {"type": "websocket.connect"}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        async def accepted(message: Message) -> None:
            if message["type"] != "websocket.accept":
                await send(message)

        await self.openenv({**scope, "path": "/ws", "raw_path": b"/ws", "root_path": ""}, replay, accepted)

    async def _serve(self, websocket: WebSocket, message: Message | None) -> None:
        session_id: str | None = None
        try:
            while message is not None:
                try:
                    answer = await self._answer(_record(message), session_id)
                    session_id = answer.get("session_id", session_id)
                except ServiceError as error:
                    answer = {"error": str(error)}
                await websocket.send_text(json.dumps(answer))
                message = await self._next(websocket)
        except WebSocketDisconnect:
            pass  # the client went while its answer was made
        finally:
            if session_id is not None:
                self.service.sessions.drop(session_id)

    async def _answer(self, record: dict[str, Any], session_id: str | None) -> dict[str, Any]:
        kind = record.pop("type", None)
        if kind == "reset":
            answer = await self.service.reset(read(ResetRequest, record))
            if session_id is not None:
                self.service.sessions.drop(session_id)
            return answer
        if kind not in ("step", "state"):
            raise ServiceError(422, "type: expected reset, step or state, found something else")
        if session_id is None:
            raise ServiceError(409, f"{kind}: expected a reset before it on the same connection, found none")
        if kind == "state":
            return await self.service.state(session_id)
        request = read(StepRequest, record)
        return await self.service.step(session_id, request.command, view=request.view)


def _record(message: Message) -> dict[str, Any]:
    try:
        record = json.loads(message.get("text") or "")
    except (RecursionError, ValueError):
        record = None
    if not isinstance(record, dict):
        raise ServiceError(400, "message: expected a JSON object as text, found something else")
    return record


def _is_openenv(message: Message) -> bool:
    try:
        record = _record(message)
    except ServiceError:
        return False
    return "data" in record or record.get("type") in ("state", "close", "mcp")
