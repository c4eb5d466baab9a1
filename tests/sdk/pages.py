"""Runs the commands of `docs/clients/*.md`: fenced blocks whose first line says `run`, in their order.

    ```sh run              a shell's, `python run` and `js run` a program's
    ```sh run needs=tools  only where the gateway serves tools

Commands run in a scratch folder, which is also the home, with the pinned clients on the path. The address in the pages is
replaced by the cluster's. What a block prints must not be empty.
"""

import os
import pathlib
import re
import shutil
import subprocess

HERE = pathlib.Path(__file__).parent
PAGES = HERE.parent.parent / "docs/clients"
ADDRESS, MODEL = "127.0.0.1:8080", "smollm2-135m-instruct"
BLOCK = re.compile(r"^```(sh|python|js) run(?: needs=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 180


def blocks(page):
    """Language, needs and text of each block."""
    found = BLOCK.findall((PAGES / f"{page}.md").read_text())
    return [(language, tuple(filter(None, needs.split(","))), text) for language, needs, text in found]


def names():
    return sorted(path.stem for path in PAGES.glob("*.md"))


def needs(page):
    """What every block of the page needs: then there is nothing to run without it."""
    wanted = [set(needs) for _, needs, _ in blocks(page)]
    return tuple(sorted(set.intersection(*wanted))) if wanted else ()


def command(language, text, folder, at):
    if language == "sh":
        return ["bash", "-euo", "pipefail", "-c", text]
    path = folder / f"block{at}.{'py' if language == 'python' else 'mjs'}"
    path.write_text(text)
    return ["python" if language == "python" else "node", str(path)]


def run(page, served, folder, cluster, python, node):
    folder.mkdir(parents=True, exist_ok=True)
    address = cluster.url.removeprefix("http://")
    copy_files(folder, address)
    link = folder / "node_modules"
    if not link.exists():
        link.symlink_to(node / "node_modules")
    path = f"{python.parent}:{node / 'node_modules/.bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(folder), "PATH": path, "OPENAI_API_KEY": "none"}
    count = 0
    for at, (language, wanted, text) in enumerate(blocks(page)):
        if not set(wanted) <= set(served):
            continue
        assert MODEL in text or language == "sh", f"block {at} names no model"
        done = subprocess.run(
            command(language, text.replace(ADDRESS, address), folder, at), cwd=folder, env=environment,
            capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and done.stdout.strip(), f"block {at}:\n{text}\n{done.stdout}{done.stderr}"
        count += 1
    assert count, "the page has no block to run"
    return f"{count} blocks"


def copy_files(folder, address):
    """The files that pages tell to copy."""
    target = folder / "tests/sdk/codex"
    shutil.copytree(HERE / "codex", target, dirs_exist_ok=True)
    config = target / "config.toml"
    config.write_text(config.read_text().replace(ADDRESS, address))
