"""The environments as a service: HTTP, WebSocket, OpenEnv, and a page to watch an episode."""
