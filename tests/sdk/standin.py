"""A scripted server in the gateway's place: it fails in the ways that a client has to live with.

A script is an object with some of these methods; what it lacks is done well:

    upgrade(nth) -> None to accept, or an HTTP status
    frame(nth, socket, frame) -> True when it has answered (nth counts frames that ask for output)
    post(nth, body) -> None to answer well, or an HTTP status
    output(frame) -> the output items of a good answer
"""

import asyncio
import inspect
import json
import time

import wire

TEXT = "Hello from the stand-in."


def response_object(number, status="in_progress", output=(), usage=None):
    return {
        "id": f"resp_{number:024x}", "object": "response", "created_at": int(time.time()), "status": status,
        "completed_at": int(time.time()) if status == "completed" else None, "background": False, "error": None,
        "incomplete_details": None, "instructions": None, "max_output_tokens": None, "max_tool_calls": None,
        "model": "stand-in", "output": list(output), "parallel_tool_calls": True, "previous_response_id": None,
        "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
        "service_tier": "default", "store": False, "temperature": 1.0, "text": {"format": {"type": "text"}},
        "tool_choice": "auto", "tools": [], "top_p": 1.0, "top_logprobs": 0, "truncation": "disabled",
        "usage": usage, "metadata": {}, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }


def message(number, text=TEXT):
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{number:024x}", "role": "assistant", "status": "completed", "content": [part]}


def call(number, name, arguments):
    return {"type": "function_call", "id": f"fc_{number:024x}", "call_id": f"call_{number:024x}", "name": name,
            "arguments": arguments, "status": "completed"}


def usage(output):
    return {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 0},
            "output_tokens": output, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 100 + output}


def item_events(index, item):
    at = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message":
        part = item["content"][0]
        yield {"type": "response.output_item.added", "output_index": index,
               "item": {**item, "status": "in_progress", "content": []}}
        at["content_index"] = 0
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}
    else:
        yield {"type": "response.output_item.added", "output_index": index,
               "item": {**item, "status": "in_progress", "arguments": ""}}
        yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **at, "arguments": item["arguments"],
               "name": item["name"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def good_events(number, items):
    """A whole answer, numbered."""
    begun = response_object(number)
    events = [{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}]
    for index, item in enumerate(items):
        events.extend(item_events(index, item))
    ended = response_object(number, "completed", items, usage(9 if items else 0))
    events.append({"type": "response.completed", "response": ended})
    return [{**event, "sequence_number": at} for at, event in enumerate(events)]


class StandIn:
    """Counts what clients do, and does what its script says."""

    def __init__(self, script=None):
        self.script = script
        self.upgrades, self.frames, self.posts, self.made = 0, [], [], 0
        self.sockets = []
        self.turns = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=wire.MAX_HEAD_BYTES)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    async def scripted(self, name, *args):
        method = getattr(self.script, name, None)
        outcome = method(*args) if method else None
        return await outcome if inspect.isawaitable(outcome) else outcome

    async def serve(self, reader, writer):
        try:
            head = await wire.read_head(reader)
            if head is None:
                return
            if head.is_upgrade:
                await self.upgrade(head, reader, writer)
            else:
                writer.write(await self.answer(head, await wire.read_body(reader, head)))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def upgrade(self, head, reader, writer):
        self.upgrades += 1
        status = await self.scripted("upgrade", self.upgrades)
        if status:
            writer.write(refusal(status))
            await writer.drain()
            return
        writer.write(wire.accepts(head))
        socket = wire.Socket(reader, writer)
        self.sockets.append(socket)
        while (text := await socket.receive()) is not None:
            frame = json.loads(text)
            self.frames.append(frame)
            warms = frame.get("generate") is False
            self.turns += not warms
            if not warms and await self.scripted("frame", self.turns, socket, frame):
                continue
            for event in good_events(self.number(), [] if warms else await self.items(frame)):
                await socket.send(event)

    async def answer(self, head, body):
        method, path = head.first[0], head.first[1]
        if method != "POST" or not path.startswith("/v1/responses"):
            return wire.json_response(404, {"error": {"message": f"no {path} here"}})
        self.posts.append(json.loads(body))
        status = await self.scripted("post", len(self.posts), self.posts[-1])
        if status:
            return refusal(status)
        events = good_events(self.number(), await self.items(self.posts[-1]))
        lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
        return wire.response(200, ("".join(lines) + "data: [DONE]\n\n").encode(), ("content-type: text/event-stream",))

    def number(self):
        self.made += 1
        return self.made

    async def items(self, frame):
        scripted = await self.scripted("output", frame)
        return scripted if scripted is not None else [message(self.made)]


def refusal(status):
    error = {"message": f"refused with {status}", "type": "server_error" if status >= 500 else "invalid_request_error",
             "param": None, "code": "scripted"}
    return wire.json_response(status, {"error": error})
