"""Starts a cluster on a free port and stops it again."""

import pathlib
import subprocess
import time

START_S = 120


class Cluster:
    """`baton up`, aggregated and greedy unless the request says otherwise."""

    def __init__(self, baton, folder, model=None, options=()):
        self.log = pathlib.Path(folder)
        self.log.mkdir(parents=True, exist_ok=True)
        self.command = [str(baton), "up", "--listen", "127.0.0.1:0", "--prefill", "0", "--decode", "1",
                        "--kv-memory-mb", "512", "--temperature", "0", "--skip-self-check",
                        *(("--model", str(model)) if model else ()), *options]
        self.process, self.url, self.model = None, None, None

    def __enter__(self):
        out, err = self.log / "baton.out", self.log / "baton.err"
        self.process = subprocess.Popen(self.command, stdout=out.open("w"), stderr=err.open("w"))
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            for line in out.read_text().splitlines():
                words = line.split()
                if words[:1] == ["gateway"]:
                    self.url = words[1]
                if words[:4] == ["Baton", "is", "up", "with"]:
                    self.model = words[4].rstrip(".")
            if self.url and self.model:
                return self
            time.sleep(0.1)
        self.__exit__()
        raise RuntimeError(f"the cluster did not start: {' '.join(self.command)}\n{err.read_text()[-2000:]}")

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def base_url(self):
        return self.url + "/v1"

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])
