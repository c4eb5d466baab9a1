#!/usr/bin/env python3
"""Drives a running cluster with the unmodified `openai` Python SDK, as a user's program would.

    python3 -m venv venv && venv/bin/pip install -r tests/sdk/requirements.txt
    venv/bin/python tests/sdk/conformance.py --base-url http://127.0.0.1:8080/v1
    venv/bin/python tests/sdk/conformance.py --compare http://127.0.0.1:8080/v1 http://127.0.0.1:8090/v1

With --base-url: `responses.create()` as JSON, the `responses.stream()` helper, an error, and a conversation of ten turns
over ONE WebSocket of `responses.connect()`, chained by `previous_response_id`, each turn with nothing but its new input.
Every turn after the first must compute no more than its own tokens and two blocks.

With --compare: the same conversation against every URL; all must give the same token ids. Beside URLs it takes files of
token ids, such as those of a run of the engine alone:

    venv/bin/python tests/sdk/conformance.py --conversation > conversation.json
    cargo run --release -p engine --example greedy -- MODEL.gguf < conversation.json > plain.json

Everything is greedy (temperature 0). Token ids come from `include: ["baton.turn"]`, Baton's own account of a turn.
Exits 0 when all is well, 1 when a check fails. `cargo test` does not run this.
"""

import argparse
import json
import sys

import openai

SLACK = 2 * 16
MAX_OUTPUT_TOKENS = 24
INSTRUCTIONS = (
    "You are a helpful assistant inside a cluster. Answer briefly and in plain words. Keep to what was asked, and to what "
    "the conversation has already established. When a question refers to an earlier answer, build on that answer instead "
    "of starting over. When you are asked for a list, give at most three entries. When you are asked for a poem, write at "
    "most four lines. When you are asked for a number, give the number first. Never apologize, never repeat the question, "
    "never mention these instructions. They are long on purpose: a prompt of this length is computed by a prefill worker "
    "and handed over to a decode worker, while the short turns that follow are computed where their history already is."
)
QUESTION = "What is the capital of France?"
TURNS = [
    "Hello! Who are you?",
    "Tell me one fact about the sea.",
    "Why is that so?",
    "A lighthouse keeper named Mara climbs two hundred and twelve steps each evening, trims the wick of the lamp and "
    "winds the clockwork that turns the lens. One night the clockwork breaks, and she turns the lens by hand until "
    "dawn, while eleven ships wait in the bay. What should the captains say to her?",
    "Yes.",
    "Write a short poem about her.",
    "Make it shorter.",
    "Which numbers did I mention?",
    "Thank you.",
    "Goodbye!",
]


class Failed(Exception):
    """A check that does not hold."""


def check(holds, what):
    if not holds:
        raise Failed(what)


def settings(model):
    return {
        "model": model,
        "temperature": 0,
        "max_output_tokens": MAX_OUTPUT_TOKENS,
        "instructions": INSTRUCTIONS,
        "include": ["baton.turn"],
    }


def whole(model):
    """Settings for an answer that ends by itself: the `stream()` helper takes no other."""
    return settings(model) | {"max_output_tokens": 100, "instructions": "You are a helpful assistant."}


def account(response):
    baton = response.model_extra.get("baton")
    check(baton, f"no account of the turn in {response.id}: is this Baton?")
    return baton


def check_response(response):
    check(response.object == "response" and response.id.startswith("resp_"), f"a response: {response}")
    reason = response.incomplete_details.reason if response.incomplete_details else None
    check(response.status == "completed" or reason == "max_output_tokens", f"{response.status}: {response.error}")
    usage = response.usage
    check(usage.total_tokens == usage.input_tokens + usage.output_tokens, f"{usage}")
    ids = account(response)["output_ids"]
    check(usage.output_tokens == len(ids), f"{usage.output_tokens} output tokens, {len(ids)} ids")
    return ids


def check_json(client, model):
    response = client.responses.create(input=QUESTION, **whole(model))
    ids = check_response(response)
    check(response.output_text, "the answer has text")
    print(f"json       ok  {response.output_text!r}")
    return ids


def check_stream(client, model, want):
    kinds = []
    with client.responses.stream(input=QUESTION, **whole(model)) as stream:
        for event in stream:
            kinds.append(event.type)
        response = stream.get_final_response()
    check(kinds[0] == "response.created", f"{kinds}")
    check(kinds[-1] in ("response.completed", "response.incomplete"), f"{kinds}")
    check("response.output_text.delta" in kinds, f"{kinds}")
    check(check_response(response) == want, "the stream says what JSON says")
    print(f"stream     ok  {len(kinds)} events")


def check_error(client):
    try:
        client.responses.create(model="no-such-model", input="Hello")
    except openai.NotFoundError as error:
        check(error.code == "model_not_found", f"{error}")
        print(f"error      ok  {error.code}")
        return
    raise Failed("an unknown model was served")


def converse(client, model, show=None):
    """Ten turns over one WebSocket; the output ids of each."""
    outputs, parent = [], None
    with client.responses.connect() as connection:
        for idx, text in enumerate(TURNS):
            fields = settings(model) | {"store": False}
            if parent:
                fields["previous_response_id"] = parent
            connection.response.create(input=[{"role": "user", "content": text}], **fields)
            response = terminal(connection)
            ids = check_response(response)
            check(response.previous_response_id == parent, f"turn {idx} continues {response.previous_response_id}")
            baton = account(response)
            limit = baton["tokenized_tokens"] + SLACK
            check(not parent or baton["computed_tokens"] <= limit,
                  f"turn {idx} computed {baton['computed_tokens']} tokens, {limit} were allowed: {baton}")
            if show:
                show(idx, response, baton)
            outputs.append(ids)
            parent = response.id
    return outputs


def terminal(connection):
    n_events = 0
    for event in connection:
        if event.type == "error":
            raise Failed(f"{event}")
        check(event.sequence_number == n_events, f"event {event.sequence_number} came as number {n_events}")
        n_events += 1
        if event.type in ("response.completed", "response.incomplete", "response.failed"):
            return event.response
    raise Failed("the connection ended within a turn")


def show(idx, response, baton):
    print(f"turn {idx:<5} ok  input {response.usage.input_tokens}, tokenized {baton['tokenized_tokens']}, "
          f"computed {baton['computed_tokens']}, by {baton['prefill_worker'] or '-'} and {baton['decode_worker']}\n"
          f"               ids {baton['output_ids']}")


def open_client(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    models = client.models.list().data
    check(models, f"{base_url} serves a model")
    return client, models[0].id


def conform(base_url):
    client, model = open_client(base_url)
    check_error(client)
    check_stream(client, model, check_json(client, model))
    converse(client, model, show)


def compare(base_urls):
    first = None
    for base_url in base_urls:
        recorded = base_url.endswith(".json")
        outputs = json.load(open(base_url)) if recorded else converse(*open_client(base_url))
        first = first or outputs
        for idx, (ids, want) in enumerate(zip(outputs, first)):
            check(ids == want, f"turn {idx}: {base_url} gives\n  {ids}\n{base_urls[0]} gives\n  {want}")
        print(f"{base_url}: {sum(map(len, outputs))} tokens in {len(outputs)} turns")
    print("identical")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--base-url", help="check one cluster, such as http://127.0.0.1:8080/v1")
    what.add_argument("--conversation", action="store_true", help="print the conversation as JSON")
    what.add_argument("--compare", nargs="+", metavar="URL", help="compare the token ids of clusters and files")
    args = parser.parse_args()
    if args.conversation:
        print(json.dumps({"instructions": INSTRUCTIONS, "turns": TURNS, "max_output_tokens": MAX_OUTPUT_TOKENS}))
        return 0
    try:
        conform(args.base_url) if args.base_url else compare(args.compare)
    except (Failed, openai.OpenAIError, OSError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
