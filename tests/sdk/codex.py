"""Runs `codex exec` in a home and a folder of its own, and reads what it reports."""

import asyncio
import json
import os
import pathlib
import signal
import time

HERE = pathlib.Path(__file__).parent
KEY = "sk-not-checked"


class Ran:
    """One run of Codex."""

    def __init__(self, code, seconds, out, err):
        self.code, self.seconds, self.out, self.err = code, seconds, out, err
        lines = [line for line in out.splitlines() if line.startswith("{")]
        self.events = [json.loads(line) for line in lines]

    def items(self, kind):
        done = [event["item"] for event in self.events if event.get("type") == "item.completed"]
        return [item for item in done if item.get("type") == kind]

    @property
    def answer(self):
        return "\n".join(item.get("text", "") for item in self.items("agent_message"))

    @property
    def errors(self):
        found = [event for event in self.events if event.get("type") in ("error", "turn.failed")]
        return [json.dumps(event) for event in found] + [json.dumps(item) for item in self.items("error")]

    def __str__(self):
        return f"exit {self.code} after {self.seconds:.1f} s\n{self.out[-3000:]}\n{self.err[-3000:]}"


def config(base_url, model=None, provider=()):
    """The small configuration for this server. `provider` are more lines of the provider's table."""
    lines = []
    for line in (HERE / "codex/config.toml").read_text().splitlines():
        if line.startswith("base_url"):
            line = f'base_url = "{base_url}"'
        if line.startswith("model =") and model:
            line = f'model = "{model}"'
        if line.startswith("supports_websockets") and any(more.startswith("supports_websockets") for more in provider):
            continue
        lines.append(line)
    return "\n".join([*lines, *provider]) + "\n"


async def run(binary, folder, base_url, prompt, *, model=None, instructions=None, provider=(), options=(),
              limit_s=120):
    """Runs one turn. `folder` is made; `instructions` are put in the place of the catalog's; `options` are more arguments."""
    home, work = folder / "home", folder / "work"
    for path in (home, work):
        path.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(config(base_url, model, provider))
    catalog = json.loads((HERE / "codex/catalog.json").read_text())
    if model:
        catalog["models"][0]["slug"] = model
    if instructions:
        catalog["models"][0]["base_instructions"] = instructions
    (home / "catalog.json").write_text(json.dumps(catalog))
    environment = {**os.environ, "CODEX_HOME": str(home), "BATON_API_KEY": KEY, "RUST_LOG": "error"}
    command = [str(binary), "exec", "--json", "--skip-git-repo-check", "-C", str(work),
               "-c", f'model_catalog_json="{home / "catalog.json"}"', *options, prompt]
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = await process.communicate()
        err += b"\nkilled: it took too long"
    return Ran(process.returncode, time.monotonic() - began, out.decode(errors="replace"), err.decode(errors="replace"))
