"""The pinned clients, installed once below the work folder."""

import hashlib
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def stamped(folder, pins):
    """True when `folder` was made for these pins."""
    stamp = folder / "pins"
    return stamp.is_file() and stamp.read_text() == hashlib.sha256(pins.read_bytes()).hexdigest()


def stamp(folder, pins):
    (folder / "pins").write_text(hashlib.sha256(pins.read_bytes()).hexdigest())


def python(work):
    """The interpreter with openai-python."""
    pins, venv = HERE / "requirements.txt", work / "venv"
    if not stamped(venv, pins):
        shutil.rmtree(venv, ignore_errors=True)
        run(sys.executable, "-m", "venv", venv)
        run(venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "-r", pins)
        stamp(venv, pins)
    return venv / "bin/python"


def node(work):
    """The folder with openai-node and Codex in its `node_modules`."""
    pins, folder = HERE / "package.json", work / "node"
    if not stamped(folder, pins):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(pins, folder)
        run("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent", cwd=folder)
        stamp(folder, pins)
    return folder


def codex(work):
    return node(work) / "node_modules/.bin/codex"


def run(*command, cwd=None):
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
