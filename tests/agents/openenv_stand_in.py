"""A stand-in for a server of OpenEnv, with the messages of openenv-core 0.3: python FILE prints its
port. The hidden number is the seed modulo 5; one session at a time beyond `SESSIONS` is refused."""

from __future__ import annotations

import json
import sys

from aiohttp import web

SESSIONS = 2
open_sessions = 0


async def session(request):
    global open_sessions
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    open_sessions += 1
    try:
        if open_sessions > SESSIONS:
            told = {"message": "it is full", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": told})
            return socket
        await play(socket)
    finally:
        open_sessions -= 1
    return socket


async def play(socket):
    number = 0
    async for message in socket:
        asked = json.loads(message.data)
        if asked["type"] == "close":
            break
        if asked["type"] == "reset":
            number = asked["data"]["seed"] % 5
            await observe(socket, "Guess from 0 to 4.", None, False)
        elif set(asked["data"]) != {"guess"}:
            told = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["guess"]}
            await socket.send_json({"type": "error", "data": told})
        elif asked["data"]["guess"] == "leave":
            break
        else:
            right = asked["data"]["guess"] == str(number)
            await observe(socket, "right" if right else "wrong", 1.0 if right else -0.25, right)


async def observe(socket, text, reward, done):
    data = {"observation": {"told": text}, "reward": reward, "done": done}
    await socket.send_json({"type": "observation", "data": data})


async def started(app):
    print("ready", flush=True)


if __name__ == "__main__":
    app = web.Application()
    app.router.add_get("/ws", session)
    app.on_startup.append(started)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
