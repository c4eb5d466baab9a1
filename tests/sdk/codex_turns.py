"""Whole turns of Codex against the gateway, through a proxy that counts: nothing may be tried twice."""

import codex
import proxy

COMMAND = "echo baton-tool-ran"
ONLY_HTTP = ("supports_websockets = false",)
# A model of this size goes on calling tools unless it is told when to stop.
ONE_LOOK = ("You answer questions about files. You may call exec_command once. After the tool response you write a short "
            "sentence for the user, never JSON.")
LONG = "The keeper counts the ships in the bay. " * 1500


def expect(holds, ran, seen):
    if not holds:
        frames = [[item.get("type") for item in body["input"]] for body in seen.bodies]
        raise AssertionError(f"{seen.upgrades} upgrades, {len(seen.posts)} posts, inputs {frames}\n{ran}")


def transport(seen, sse, n_turns):
    """One socket and its frames, with the warm-up; or one post a turn."""
    if sse:
        return seen.upgrades == 0 and len(seen.posts) == n_turns
    return seen.upgrades == 1 and len(seen.frames) == n_turns + 1 and not seen.posts


async def text(binary, folder, cluster, *, sse=False):
    provider = ONLY_HTTP if sse else ()
    async with proxy.Proxy(cluster.port) as seen:
        ran = await codex.run(binary, folder, seen.base_url, "Say hello.", model=cluster.model, provider=provider)
    expect(ran.code == 0 and ran.answer and transport(seen, sse, 1), ran, seen)
    return f"{ran.seconds:.1f} s, {ran.answer[:50]!r}"


async def tool(binary, folder, cluster, *, sse=False):
    """The model is made to call `exec_command`; Codex runs it and gets an answer to its output."""
    provider = ONLY_HTTP if sse else ()
    forces = proxy.Forces("exec_command", {"cmd": COMMAND})
    async with proxy.Proxy(cluster.port, forces) as seen:
        ran = await codex.run(binary, folder, seen.base_url, "Run the tool.", model=cluster.model, provider=provider)
    ran_commands = ran.items("command_execution")
    called = len(ran_commands) == 1 and "baton-tool-ran" in ran_commands[0]["aggregated_output"]
    expect(ran.code == 0 and called and ran.answer and transport(seen, sse, 2), ran, seen)
    last = seen.bodies[-1]
    outputs = [item for item in last["input"] if item["type"] == "function_call_output"]
    expect(len(outputs) == 1 and "baton-tool-ran" in str(outputs[0]["output"]), ran, seen)
    delta = last.get("previous_response_id") and len(last["input"]) == 1
    expect(sse or delta, ran, seen)
    return f"{ran.seconds:.1f} s"


async def too_long(binary, folder, cluster):
    """A prompt beyond the context fails at once, and says why."""
    async with proxy.Proxy(cluster.port) as seen:
        ran = await codex.run(binary, folder, seen.base_url, LONG, model=cluster.model)
    expect(ran.code == 1 and seen.upgrades == 1 and "context" in " ".join(ran.errors).lower(), ran, seen)
    return f"{ran.seconds:.1f} s"


async def connection_limit(binary, folder, cluster):
    """A connection is old after a second, and the tool takes longer: Codex goes on over a new one, with everything."""
    forces = proxy.Forces("exec_command", {"cmd": f"sleep 2; {COMMAND}"})
    async with proxy.Proxy(cluster.port, forces) as seen:
        ran = await codex.run(binary, folder, seen.base_url, "Run the tool.", model=cluster.model)
    expect(ran.code == 0 and ran.answer and seen.upgrades >= 2 and not seen.posts, ran, seen)
    again = seen.bodies[-1]
    outputs = [item for item in again["input"] if item["type"] == "function_call_output"]
    expect(not again.get("previous_response_id") and len(outputs) == 1 and len(again["input"]) > 2, ran, seen)
    return f"{ran.seconds:.1f} s, {seen.upgrades} upgrades"


async def two_tools(binary, folder, cluster):
    """A model that can: it lists the files with a tool, reads what the tool says, and answers. No proxy's edits, nothing
    forced."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    (work / "harbour.txt").write_text("The harbour master is called Edda Brandt.\n")
    (work / "ships.txt").write_text("Ada, Grace, Hedy\n")
    prompt = "Use exec_command to list the files in this folder with ls. Then answer: which files are there?"
    async with proxy.Proxy(cluster.port) as seen:
        ran = await codex.run(binary, folder, seen.base_url, prompt, model=cluster.model,
                              instructions=ONE_LOOK, limit_s=600)
    commands = [item["command"] for item in ran.items("command_execution")]
    told = all(name in ran.answer for name in ("harbour.txt", "ships.txt"))
    expect(ran.code == 0 and len(commands) == 1 and told and seen.upgrades == 1 and not seen.posts, ran, seen)
    return f"{ran.seconds:.1f} s, {commands}, {ran.answer[:80]!r}"
