"""Eight clients at once with a common prefix: time to the first token, against a cold server.

    ttft.py baton URL                an OpenAI Responses endpoint that runs already
    ttft.py llama.cpp MODEL.gguf N   starts the server of the package `xllamacpp` with N threads and eight slots

Prints one line of JSON: {"p50": seconds, "max": seconds, "wall": seconds}.
"""

import http.client
import json
import sys
import threading
import time
import urllib.parse
import urllib.request

N_CLIENTS = 8
OUTPUT_TOKENS = 32
PREFIX = " ".join(
    f"Rule {i}: answer briefly, name the source of every fact, and never repeat the question in the answer."
    for i in range(1, 20)
)


def ask(host, port, path, body, results, barrier):
    connection = http.client.HTTPConnection(host, port, timeout=300)
    barrier.wait()
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    first = None
    while line := response.readline():
        text = line.decode().strip()
        has_text = '"delta":{"content":"' in text or '"response.output_text.delta"' in text
        if first is None and has_text and text.startswith("data:"):
            first = time.perf_counter() - began
    results.append((first, time.perf_counter() - began))


def measure(host, port, path, body_of):
    results, barrier = [], threading.Barrier(N_CLIENTS + 1)
    clients = [
        threading.Thread(target=ask, args=(host, port, path, body_of(i), results, barrier))
        for i in range(N_CLIENTS)
    ]
    for client in clients:
        client.start()
    barrier.wait()
    began = time.perf_counter()
    for client in clients:
        client.join()
    wall = time.perf_counter() - began
    firsts = sorted(first for first, _ in results if first is not None)
    if len(firsts) < N_CLIENTS:
        sys.exit(f"only {len(firsts)} of {N_CLIENTS} clients got text")
    print(json.dumps({"p50": firsts[N_CLIENTS // 2], "max": firsts[-1], "wall": wall}))


def question(i):
    return f"What is {i} plus {i + 1}, and why?"


if sys.argv[1] == "baton":
    url = urllib.parse.urlparse(sys.argv[2])
    with urllib.request.urlopen(f"{sys.argv[2]}/v1/models") as models:
        model = json.load(models)["data"][0]["id"]
    measure(
        url.hostname,
        url.port,
        "/v1/responses",
        lambda i: {
            "model": model,
            "instructions": PREFIX,
            "input": question(i),
            "temperature": 0,
            "max_output_tokens": OUTPUT_TOKENS,
            "stream": True,
            "store": False,
        },
    )
else:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[2]
    params.n_parallel = N_CLIENTS
    params.n_ctx = N_CLIENTS * 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
    params.warmup = True
    server = xllamacpp.Server(params)
    url = urllib.parse.urlparse(server.listening_address)
    measure(
        url.hostname,
        url.port,
        "/v1/chat/completions",
        lambda i: {
            "messages": [{"role": "system", "content": PREFIX}, {"role": "user", "content": question(i)}],
            "temperature": 0,
            "max_tokens": OUTPUT_TOKENS,
            "stream": True,
            "cache_prompt": True,
        },
    )
