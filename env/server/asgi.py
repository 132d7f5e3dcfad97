"""The application as an object, for servers and tools that import one: `uvicorn env.server.asgi:app`."""

from env.server.app import create_application

app = create_application()
