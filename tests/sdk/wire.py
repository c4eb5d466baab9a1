"""HTTP/1.1 and WebSocket by hand, as far as a stand-in and a proxy need them: no compression, no fragments, no TLS."""

import asyncio
import base64
import hashlib
import json
import os
import struct

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
MAX_HEAD_BYTES = 1 << 20


class Head:
    """A request's first line and headers, whose names are lower-case."""

    def __init__(self, text):
        lines = text.split("\r\n")
        self.first = lines[0].split(" ")
        self.headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()

    @property
    def is_upgrade(self):
        return self.headers.get("upgrade", "").lower() == "websocket"


async def read_head(reader):
    """The head of a message, or None when the other side is gone."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Head(head[:-4].decode("latin-1"))


async def read_body(reader, head):
    length = int(head.headers.get("content-length", 0))
    return await reader.readexactly(length) if length else b""


def response(status, body=b"", headers=(), reason="Status"):
    lines = [f"HTTP/1.1 {status} {reason}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def json_response(status, value, headers=()):
    return response(status, json.dumps(value).encode(), ("content-type: application/json", *headers))


def accepts(head):
    """The answer that makes a WebSocket. Offers of compression are declined by saying nothing."""
    key = head.headers["sec-websocket-key"] + GUID
    digest = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    lines = ("HTTP/1.1 101 Switching Protocols", "upgrade: websocket", "connection: Upgrade",
             f"sec-websocket-accept: {digest}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


class Socket:
    """An open WebSocket; the client's side masks what it sends."""

    def __init__(self, reader, writer, masks=False):
        self.reader, self.writer, self.masks = reader, writer, masks
        self.pongs = 0

    async def receive(self):
        """The next text, or None when the other side has closed or is gone."""
        while True:
            try:
                kind, payload = await self.frame()
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            if kind == TEXT:
                return payload.decode()
            if kind == PING:
                await self.write(PONG, payload)
            elif kind == PONG:
                self.pongs += 1
            else:
                return None

    async def frame(self):
        first, second = await self.reader.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", await self.reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", await self.reader.readexactly(8))
        mask = await self.reader.readexactly(4) if second & 0x80 else None
        payload = await self.reader.readexactly(length)
        return first & 0x0F, masked(payload, mask) if mask else payload

    async def send(self, value):
        await self.write(TEXT, (value if isinstance(value, str) else json.dumps(value)).encode())

    async def close(self, code):
        await self.write(CLOSE, struct.pack("!H", code))

    async def write(self, kind, payload):
        length = len(payload)
        bit = 0x80 if self.masks else 0
        if length < 126:
            head = struct.pack("!BB", 0x80 | kind, bit | length)
        elif length < 1 << 16:
            head = struct.pack("!BBH", 0x80 | kind, bit | 126, length)
        else:
            head = struct.pack("!BBQ", 0x80 | kind, bit | 127, length)
        if self.masks:
            mask = os.urandom(4)
            head, payload = head + mask, masked(payload, mask)
        self.writer.write(head + payload)
        await self.writer.drain()


def masked(payload, mask):
    keys = int.from_bytes((mask * (len(payload) // 4 + 1))[: len(payload)], "big")
    return (int.from_bytes(payload, "big") ^ keys).to_bytes(len(payload), "big")


async def connect(host, port, path, headers=()):
    """Opens a WebSocket as a client."""
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = (f"GET {path} HTTP/1.1", f"host: {host}:{port}", "upgrade: websocket", "connection: Upgrade",
             "sec-websocket-version: 13", f"sec-websocket-key: {key}", *headers)
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
    head = await read_head(reader)
    if head is None or head.first[1] != "101":
        raise ConnectionError(f"no WebSocket at {path}: {head and head.first}")
    return Socket(reader, writer, masks=True)
