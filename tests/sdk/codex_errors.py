"""How Codex takes each failure of a server: the rows of protocol.md's matrix, against a stand-in.

A row is a script for the stand-in and what must come of it. Codex's own retry settings are the default ones.
"""

import asyncio

import codex
import standin
import wire

PROMPT = "Say hello."
ONLY_HTTP = ("supports_websockets = false",)
SHORT_IDLE = ("stream_idle_timeout_ms = 2000",)


def error_frame(status, code, message="scripted", kind="invalid_request_error"):
    return {"type": "error", "status": status, "error": {"type": kind, "code": code, "message": message, "param": None}}


class Refuses:
    """Answers upgrades with a status."""

    def __init__(self, status):
        self.status = status

    def upgrade(self, _nth):
        return self.status


class Says:
    """Answers creates with these events, always or only the first time."""

    def __init__(self, *events, times=None, created=False):
        self.events, self.times, self.created = events, times, created

    async def frame(self, nth, socket, _frame):
        if self.times and nth > self.times:
            return False
        if self.created:
            begun = standin.response_object(900 + nth)
            await socket.send({"type": "response.created", "sequence_number": 0, "response": begun})
        for event in self.events:
            await socket.send(event)
        return True


class Closes:
    """Closes in the middle of the first answer."""

    async def frame(self, nth, socket, _frame):
        if nth > 1:
            return False
        await socket.send(standin.good_events(900, [])[0])
        await socket.close(1011)
        socket.writer.close()
        return True


class Posts:
    """Answers POST with a status, always."""

    def __init__(self, status):
        self.status = status

    def post(self, _nth, _body):
        return self.status


class Waits:
    """Sends pings or heartbeats for longer than Codex waits for data, then answers well."""

    def __init__(self, beats):
        self.beats = beats

    async def frame(self, nth, socket, _frame):
        events = standin.good_events(900 + nth, [standin.message(900 + nth)])
        number = 0
        for event in events:
            if event["type"] == "response.output_item.added":
                for _ in range(8):
                    await asyncio.sleep(0.5)
                    if self.beats:
                        await socket.send({**events[1], "sequence_number": number})
                        number += 1
                    else:
                        await socket.write(wire.PING, b"")
            await socket.send({**event, "sequence_number": number})
            number += 1
        return True


class Pings:
    """Sends a ping within an answer."""

    async def frame(self, nth, socket, _frame):
        await socket.write(wire.PING, b"there?")
        for event in standin.good_events(900 + nth, [standin.message(900 + nth)]):
            await socket.send(event)
        return True


class Calls:
    """Answers with these calls until there is an output."""

    def __init__(self, *calls):
        self.calls = calls

    def output(self, frame):
        if any(item["type"] == "function_call_output" for item in frame["input"]):
            return None
        return [standin.call(700 + at, *call) for at, call in enumerate(self.calls)]


def failed(code, message="scripted"):
    response = {**standin.response_object(901), "status": "failed", "error": {"code": code, "message": message}}
    return {"type": "response.failed", "sequence_number": 1, "response": response}


def incomplete():
    response = {**standin.response_object(901), "status": "incomplete", "usage": standin.usage(5),
                "incomplete_details": {"reason": "max_output_tokens"}}
    return {"type": "response.incomplete", "sequence_number": 1, "response": response}


class Row:
    """A script, and the counts it must lead to. `None` leaves a count alone; a pair gives bounds."""

    def __init__(self, script, *, code=0, upgrades=1, posts=0, answered=None, provider=(), check=None, limit_s=120):
        self.script, self.code, self.upgrades, self.posts = script, code, upgrades, posts
        self.answered = code == 0 if answered is None else answered
        self.provider, self.check, self.limit_s = provider, check, limit_s


def within(count, wanted):
    low, high = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    return low <= count <= high


def full_input(_ran, server):
    last = server.frames[-1]
    return "previous_response_id" not in last and len(last["input"]) >= 2


def said(text):
    return lambda _ran, server: any(text in str(item.get("output")) for item in server.frames[-1]["input"])


def at_once(ran, _server):
    return ran.seconds < 4


LIMIT = error_frame(400, "websocket_connection_limit_reached", "limit reached (60 minutes)")
NOT_FOUND = error_frame(400, "previous_response_not_found", "not found")
SILENT = {"type": "error", "error": {"type": "server_error", "code": "server_error", "message": "no status"}}

# Reconnects are one socket for the warm-up and up to seven for the turn; then the same turn goes over HTTP.
ROWS = {
    "upgrade-426": Row(Refuses(426), posts=1, check=at_once),
    "upgrade-404": Row(Refuses(404), upgrades=(6, 8), posts=1),
    "error-400": Row(Says(error_frame(400, "invalid_request")), code=1, check=at_once),
    "error-context-length": Row(Says(error_frame(400, "context_length_exceeded")), code=1, check=at_once),
    "error-429": Row(Says(error_frame(429, "rate_limit_exceeded", kind="rate_limit_error")), code=1, check=at_once),
    "error-401": Row(Says(error_frame(401, "invalid_api_key", kind="authentication_error")), upgrades=(6, 8), posts=1),
    "error-500": Row(Says(error_frame(500, "server_error", kind="server_error")), upgrades=(6, 8), posts=1),
    "error-not-found": Row(Says(NOT_FOUND, times=1), upgrades=2, check=full_input),
    "error-connection-limit": Row(Says(LIMIT, times=1), upgrades=2, check=full_input),
    "failed-server-error": Row(Says(failed("server_error"), created=True), upgrades=(6, 8), posts=1),
    "failed-context-length": Row(Says(failed("context_length_exceeded"), created=True), code=1, check=at_once),
    "failed-rate-limit": Row(
        Says(failed("rate_limit_exceeded", "Rate limit reached. Please try again in 1s."), created=True),
        upgrades=(6, 8), posts=1, check=lambda ran, _server: ran.seconds > 5),
    "incomplete": Row(Says(incomplete(), created=True), code=1),
    "close-1011": Row(Closes(), upgrades=2),
    "server-ping": Row(Pings(), check=lambda _ran, server: server.sockets[-1].pongs == 1),
    "error-without-status": Row(Says(SILENT), upgrades=(6, 8), posts=1, provider=SHORT_IDLE),
    "only-pings": Row(Waits(beats=False), upgrades=(6, 8), posts=1, provider=SHORT_IDLE),
    "heartbeats": Row(Waits(beats=True), provider=SHORT_IDLE, check=lambda ran, _server: ran.seconds > 3.5),
    "http-500": Row(Posts(500), code=1, upgrades=0, posts=30, provider=ONLY_HTTP, limit_s=240),
    "http-429": Row(Posts(429), code=1, upgrades=0, posts=1, provider=ONLY_HTTP),
    "http-401": Row(Posts(401), code=1, upgrades=0, posts=6, provider=ONLY_HTTP),
    "http-400": Row(Posts(400), code=1, upgrades=0, posts=1, provider=ONLY_HTTP),
    "unknown-tool": Row(Calls(("no_such_tool", "{}")), check=said("unsupported call")),
    "bad-arguments": Row(Calls(("exec_command", '{"cmd": ')), check=said("failed to parse")),
}


async def check(binary, folder, name):
    """Runs one row; raises when Codex takes it differently."""
    row = ROWS[name]
    async with standin.StandIn(row.script) as server:
        ran = await codex.run(binary, folder, server.base_url, PROMPT, provider=row.provider, limit_s=row.limit_s)
    counts = f"{server.upgrades} upgrades, {len(server.frames)} frames, {len(server.posts)} posts"
    fine = (ran.code == row.code and within(server.upgrades, row.upgrades) and within(len(server.posts), row.posts)
            and bool(ran.answer) == row.answered and (row.check is None or row.check(ran, server)))
    if not fine:
        raise AssertionError(f"{counts}\n{ran}")
    return f"exit {ran.code}, {counts}"
