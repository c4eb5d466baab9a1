#!/usr/bin/env python3
"""Makes the small fixtures from recordings of real clients.

    tests/conformance/trim.py path/to/recordings tests/conformance/fixtures

Keeps what a client sent, with its long texts cut, and of the server's events only those that give ids to later frames.
Tools that equal those of the frame before are written as "same".
A recording's ids stay as they are: the replay puts those of the running server in their place.
"""

import json
import pathlib
import sys

LONGEST = 28


def cut(value):
    """The value with long prose cut. Schemas, names and ids stay."""
    if isinstance(value, str):
        prose = len(value) > LONGEST and (" " in value or len(value) > 100)
        return value[: LONGEST - 1] + "." if prose else value
    if isinstance(value, list):
        return [cut(part) for part in value]
    if isinstance(value, dict):
        return {name: part if name == "encrypted_content" else cut(part) for name, part in value.items()}
    return value


def server(entry):
    event = entry.get("event")
    if not event:
        return None
    kind = event["type"]
    if kind == "response.output_item.done":
        item = {name: event["item"][name] for name in ("type", "id", "call_id", "name") if name in event["item"]}
        return {"dir": "server", "kind": "ws_text", "event": {"type": kind, "item": item}}
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        response = {"id": event["response"]["id"]}
        return {"dir": "server", "kind": "ws_text", "event": {"type": kind, "response": response}}
    if kind == "error":
        return {"dir": "server", "kind": "ws_text", "event": {"type": kind, "code": event.get("error", {}).get("code")}}
    return None


def client(entry):
    kept = {"dir": "client", "kind": entry["kind"]}
    for name in ("method", "path"):
        if name in entry:
            kept[name] = entry[name]
    for name in ("frame", "body"):
        if name in entry:
            kept[name] = arguments_whole(entry[name], cut(entry[name]))
    return kept


def arguments_whole(original, short):
    """Arguments, custom inputs and grammars mean nothing when cut."""
    if isinstance(original, dict):
        for name, value in original.items():
            if name in ("arguments", "definition") or (name == "input" and isinstance(value, str)):
                short[name] = value
            else:
                arguments_whole(value, short[name])
    elif isinstance(original, list):
        for whole, part in zip(original, short):
            arguments_whole(whole, part)
    return short


def say_tools_once(entries):
    before = None
    for entry in filter(None, entries):
        body = entry.get("frame") or entry.get("body") or {}
        tools = body.get("tools")
        if tools and tools == before:
            body["tools"] = "same"
        before = tools or before


def main():
    recordings, fixtures = (pathlib.Path(path) for path in sys.argv[1:3])
    for path in sorted(recordings.glob("*.json")):
        recording = json.loads(path.read_text())
        if "exchange" not in recording:
            continue
        entries = [client(e) if e["dir"] == "client" else server(e) for e in recording["exchange"]]
        say_tools_once(entries)
        small = {
            "client": recording["client"],
            "scenario": recording["scenario"],
            "exchange": [entry for entry in entries if entry],
        }
        lines = ",\n  ".join(json.dumps(entry) for entry in small.pop("exchange"))
        head = json.dumps(small)[:-1]
        (fixtures / path.name).write_text(f'{head},\n "exchange": [\n  {lines}\n ]}}\n')


if __name__ == "__main__":
    main()
