# The environments as a service, without an adapter's weights.
#
#   docker build -t tensor-scheduling .
#   docker run --rm -p 127.0.0.1:8000:8000 tensor-scheduling
FROM python:3.11-slim

WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY env env
# The environments and the server need no model: of the project's dependencies, what env.scheduler and env.server import.
RUN pip install --no-cache-dir -c constraints.txt fastapi gymnasium numpy openenv uvicorn websockets

RUN useradd --create-home server
USER server
EXPOSE 8000
HEALTHCHECK CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=3)"
CMD ["python", "-m", "env.server", "--host", "0.0.0.0", "--port", "8000"]
