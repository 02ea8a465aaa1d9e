"""A bare Starlette handler with only the steps that every durable chat turn needs.

    python floor_server.py FOLDER SECONDS

A turn makes six thread hops, two of which append a line to the session's file and sync it, and
waits SECONDS for a model. The process prints its address as one line and ends when its stdin is
closed.
"""

import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

_THREADS = 32
_LINE = b'{"role":"user","content":"Is that so?"}' + b" " * 100 + b"\n"


def _application(folder: Path, seconds: float) -> Starlette:
    pool = ThreadPoolExecutor(_THREADS)
    files: dict[str, int] = {}

    def append(key: str) -> None:
        if key not in files:
            name = folder / key.replace(":", "_")
            files[key] = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(files[key], _LINE)
        os.fdatasync(files[key])

    async def chat(request: Request) -> JSONResponse:
        loop, key = asyncio.get_running_loop(), request.headers["x-session-key"]
        await request.json()
        for step in range(6):
            if step in (1, 4):
                await loop.run_in_executor(pool, append, key)
            else:
                await loop.run_in_executor(pool, int)
            if step == 3:
                await asyncio.sleep(seconds)
        return JSONResponse({"choices": [{"message": {"content": "That is so."}}]})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def _serve(folder: Path, seconds: float) -> None:
    folder.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs yet
    # asyncio sends small writes without delay only if the protocol is named.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(1024)
    config = uvicorn.Config(_application(folder, seconds), log_level="error", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
