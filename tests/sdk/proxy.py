"""A proxy between a client and the gateway: counts what passes, and may change what the client asks.

A tiny model would never choose to call a tool. [`Forces`] makes the choice for it, and nothing else: the gateway still
renders, constrains, decodes and parses the call, and the client still runs it.
"""

import asyncio
import json

import wire


class Forces:
    """Allows one function only this one set of arguments, and asks for it until there is an output."""

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def edit(self, body):
        for tool in body.get("tools") or []:
            if tool.get("name") == self.function:
                fields = {name: {"type": "string", "enum": [value]} for name, value in self.arguments.items()}
                tool["parameters"] = {"type": "object", "properties": fields, "required": list(fields),
                                      "additionalProperties": False}
                tool["strict"] = True
        items = body["input"] if isinstance(body.get("input"), list) else []
        answered = any(item.get("type") == "function_call_output" for item in items)
        if body.get("generate") is not False:
            body["tool_choice"] = "none" if answered else {"type": "function", "name": self.function}
        return body


class Proxy:
    """Listens on a port of its own and passes everything on to `port`."""

    def __init__(self, port, edits=None):
        self.upstream, self.edits = port, edits
        self.upgrades, self.frames, self.posts, self.events = 0, [], [], []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=wire.MAX_HEAD_BYTES)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def bodies(self):
        return self.frames + self.posts

    def edit(self, body):
        return self.edits.edit(body) if self.edits else body

    async def serve(self, reader, writer):
        try:
            head = await wire.read_head(reader)
            if head is None:
                return
            if head.is_upgrade:
                self.upgrades += 1
                await self.sockets(head, reader, writer)
            else:
                await self.request(head, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def sockets(self, head, reader, writer):
        kept = [f"{name}: {head.headers[name]}" for name in ("authorization", "openai-beta") if name in head.headers]
        server = await wire.connect("127.0.0.1", self.upstream, head.first[1], kept)
        writer.write(wire.accepts(head))
        client = wire.Socket(reader, writer)
        passing = {asyncio.create_task(self.up(client, server)), asyncio.create_task(self.down(server, client))}
        _, left = await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        server.writer.close()

    async def up(self, client, server):
        while (text := await client.receive()) is not None:
            frame = json.loads(text)
            self.frames.append(frame)
            await server.send(self.edit(json.loads(text)) if frame.get("type") == "response.create" else text)

    async def down(self, server, client):
        while (text := await server.receive()) is not None:
            self.events.append(json.loads(text))
            await client.send(text)

    async def request(self, head, reader, writer):
        body = await wire.read_body(reader, head)
        if head.first[0] == "POST" and head.first[1].endswith("/responses"):
            self.posts.append(json.loads(body))
            body = json.dumps(self.edit(json.loads(body))).encode()
        kept = {name: value for name, value in head.headers.items()
                if name in ("authorization", "content-type", "accept")}
        lines = [" ".join(head.first), "host: 127.0.0.1", "connection: close", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in kept.items()]
        answers, upstream = await asyncio.open_connection("127.0.0.1", self.upstream)
        upstream.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        while chunk := await answers.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
        upstream.close()
