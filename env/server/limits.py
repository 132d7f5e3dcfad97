"""The bound on what a client may send, in front of everything else."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env.server.requests import LARGEST_BODY

TOO_LARGE = 1009
"""WebSocket's code for a message that is too big."""


class LargestBody:
    """Refuses bodies (413) and WebSocket messages (closed with 1009) of more than `LARGEST_BODY` bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self.app(scope, _socket(receive, send), send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "0")
        size = int(declared) if declared.isascii() and declared.isdecimal() and len(declared) < 20 else 0
        body = bytearray()
        more = size <= LARGEST_BODY
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            size = max(size, len(body))
            more = message.get("more_body", False) and size <= LARGEST_BODY
        if size > LARGEST_BODY:
            error = f"body: expected at most {LARGEST_BODY} bytes, found more"
            await JSONResponse({"error": error}, 413, {"connection": "close"})(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, replay, send)


def _socket(receive: Receive, send: Send) -> Receive:
    async def bounded() -> Message:
        message = await receive()
        content = message.get("text") or message.get("bytes") or ""
        if len(content.encode() if isinstance(content, str) else content) > LARGEST_BODY:
            await send({"type": "websocket.close", "code": TOO_LARGE})
            return {"type": "websocket.disconnect", "code": TOO_LARGE}
        return message

    return bounded
