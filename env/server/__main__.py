"""Serve the environments.

python -m env.server
python -m env.server --port 8080 --adapter ckpt/imitation
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import uvicorn

from env.server.app import create_application
from env.server.player import PlayerError, adapter_player
from env.server.requests import LARGEST_BODY
from env.server.service import IDLE_SECONDS, MOST_SESSIONS

DONE, BAD_INPUT = 0, 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlayerError(f"{message} (--help lists the options)")


class _Server(uvicorn.Server):
    """Says where it listens, once it does (with port 0 the system chooses one), and ends quietly when it is told to."""

    async def startup(self, *args: object, **kwargs: object) -> None:
        await super().startup(*args, **kwargs)  # type: ignore[arg-type]
        for server in getattr(self, "servers", []):
            for socket in server.sockets:
                host, port = socket.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                print(f"serving on http://{shown}:{port}/  (Ctrl-C ends it)", flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but a signal that was obeyed is not raised again."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m env.server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="0 lets the system choose (default: %(default)s)")
    add("--adapter", type=Path, metavar="DIR", help="adapter folder that plays for the policy adapter")
    add("--idle-seconds", type=float, default=IDLE_SECONDS, help="after which a session ends (default: %(default)g)")
    add("--most-sessions", type=int, default=MOST_SESSIONS, help="at once (default: %(default)s)")
    args = parser.parse_args(argv)
    if not 0 <= args.port <= 65535:
        parser.error(f"--port: expected 0 to 65535, found {args.port}")
    if not args.idle_seconds > 0 or args.most_sessions < 1:
        parser.error("--idle-seconds, --most-sessions: expected more than 0, found less")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; exit status 2 for bad input."""
    try:
        args = _arguments(sys.argv[1:] if argv is None else argv)
        answer = adapter_player(args.adapter) if args.adapter is not None else None
        application = create_application(answer, idle_seconds=args.idle_seconds, most_sessions=args.most_sessions)
    except (PlayerError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    config = uvicorn.Config(
        application,
        host=args.host,
        port=args.port,
        log_level="warning",
        ws_max_size=LARGEST_BODY,
        timeout_graceful_shutdown=3,
    )
    server = _Server(config)
    server.run()
    return DONE if server.started else BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
