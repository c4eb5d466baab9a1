"""Times steps of llama.cpp on request: a line in, seconds out.

    prefill N               one pass over N tokens, the second of two
    decode CONTEXT BATCH    a step with one token of each of BATCH sequences of CONTEXT tokens, mean of a few

Used by `cargo xtask compare-llama-cpp`; the other side is `engine/examples/steps.rs`.
"""

import sys
import time

import llama_cpp as l

MODEL, N_THREADS = sys.argv[1], int(sys.argv[2])
DECODE_STEPS = 48
WARM_STEPS = 16
MAX_SEQUENCES = 16


def quiet(level, text, data):
    pass


log = l.llama_log_callback(quiet)
l.llama_log_set(log, None)
l.llama_backend_init()
model = l.llama_model_load_from_file(MODEL.encode(), l.llama_model_default_params())
batch = l.llama_batch_init(2048, 0, MAX_SEQUENCES)


def context(n_tokens, n_sequences):
    params = l.llama_context_default_params()
    params.n_ctx = (n_tokens + DECODE_STEPS + WARM_STEPS + 32) * n_sequences
    params.n_batch = 2048
    params.n_ubatch = 512
    params.n_seq_max = n_sequences
    params.n_threads = params.n_threads_batch = N_THREADS
    params.no_perf = True
    return l.llama_init_from_model(model, params)


def run(ctx, rows):
    """rows: (token, position, sequence, wants logits)"""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, logits) in enumerate(rows):
        batch.token[i] = token
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = logits
    began = time.perf_counter()
    if l.llama_decode(ctx, batch) != 0:
        sys.exit("llama_decode failed")
    l.llama_synchronize(ctx)
    return time.perf_counter() - began


def prompt(n_tokens, sequence=0):
    last = n_tokens - 1
    return [(100 + i * 17 % 40000, i, sequence, i == last) for i in range(n_tokens)]


contexts = {}


def emptied(n_tokens, n_sequences):
    """A context that has run before, so that no first-time work is timed."""
    key = (n_tokens, n_sequences)
    if key not in contexts:
        for old in contexts.values():
            l.llama_free(old)
        contexts.clear()
        contexts[key] = context(n_tokens, n_sequences)
        run(contexts[key], prompt(n_tokens))
    l.llama_memory_clear(l.llama_get_memory(contexts[key]), True)
    return contexts[key]


def prefill(n_tokens):
    # After a pause the first pass finds cold caches and a slow clock.
    run(emptied(n_tokens, 1), prompt(n_tokens))
    return run(emptied(n_tokens, 1), prompt(n_tokens))


def decode(n_context, n_sequences):
    ctx = emptied(n_context, n_sequences)
    for sequence in range(n_sequences):
        run(ctx, prompt(n_context, sequence))
    seconds = 0.0
    for step in range(WARM_STEPS + DECODE_STEPS):
        took = run(ctx, [(500 + s, n_context + step, s, True) for s in range(n_sequences)])
        seconds += took if step >= WARM_STEPS else 0.0
    return seconds / DECODE_STEPS


for line in sys.stdin:
    name, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    seconds = prefill(*numbers) if name == "prefill" else decode(*numbers)
    # llama.cpp's threads spin for a while after their work; they must not do so while the other side is timed.
    time.sleep(0.5)
    print(seconds, flush=True)
