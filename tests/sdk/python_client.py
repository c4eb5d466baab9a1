"""What a program does with openai-python: one case a run, `python_client.py CASE BASE_URL MODEL`. Raises when it fails."""

import json
import sys

import openai
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
RULES = "You are a helpful assistant."
WEATHER = {
    "type": "function", "name": "get_weather", "description": "The weather of a city", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
                   "required": ["city"], "additionalProperties": False},
}
FORCED = {"type": "function", "name": "get_weather"}


class Answer(BaseModel):
    """What `parse` gets."""

    city: str
    capital: bool


class Program:
    """A client with the settings that all cases share."""

    def __init__(self, base_url, model):
        self.client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
        self.responses = self.client.responses
        self.model = model
        self.asked = {"model": model, "input": QUESTION, "instructions": RULES, "temperature": 0}


def finish(connection):
    """Reads one response from a socket: its deltas and its end."""
    text, number = "", 0
    for event in connection:
        assert event.type != "error", event
        assert event.sequence_number == number, (event, number)
        number += 1
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type in ("response.completed", "response.incomplete", "response.failed"):
            assert event.type != "response.failed", event
            return text, event.response
    raise AssertionError("the connection ended within a response")


def check_text(response):
    assert response.status == "completed" and "Paris" in response.output_text, response
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage


def json_answer(program):
    check_text(program.responses.create(**program.asked))


def sse(program):
    kinds, text, last = [], "", None
    for event in program.responses.create(**program.asked, stream=True):
        assert event.sequence_number == len(kinds)
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed", kinds
    assert last.response.output_text == text
    check_text(last.response)


def stream_helper(program):
    with program.responses.stream(**program.asked) as stream:
        kinds = [event.type for event in stream]
        check_text(stream.get_final_response())
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds, kinds


def ws_text(program):
    with program.responses.connect() as connection:
        connection.response.create(**program.asked)
        text, response = finish(connection)
    assert text == response.output_text
    check_text(response)


def ws_chain(program):
    """Six turns on one socket; each sends only what is new."""
    parent, held = None, 0
    with program.responses.connect() as connection:
        for turn in ["Hello!", QUESTION, "And of Italy?", "And of Spain?", "Thank you.", "Goodbye!"]:
            fields = {"model": program.model, "instructions": RULES, "temperature": 0, "store": False}
            if parent:
                fields["previous_response_id"] = parent
            connection.response.create(input=turn, max_output_tokens=24, **fields)
            _, response = finish(connection)
            assert response.previous_response_id == parent
            assert response.usage.input_tokens > held
            held, parent = response.usage.total_tokens, response.id


def ws_warm_up(program):
    with program.responses.connect() as connection:
        warm = {"type": "response.create", "model": program.model, "instructions": RULES, "generate": False,
                "input": [{"role": "user", "content": "Hello"}]}
        connection.send(warm)
        _, warm = finish(connection)
        assert warm.output == [] and warm.usage.output_tokens == 0, warm
        connection.response.create(**program.asked, previous_response_id=warm.id)
        assert finish(connection)[1].status == "completed"


def ws_error(program):
    """An error is an event, and the socket goes on."""
    with program.responses.connect() as connection:
        connection.response.create(**program.asked, previous_response_id="resp_0123456789abcdef01234567")
        error = next(iter(connection))
        assert error.type == "error" and error.error.code == "previous_response_not_found", error
        connection.response.create(**program.asked)
        check_text(finish(connection)[1])


def errors(program):
    for fields, kind, code in [
        ({"model": "no-such-model"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, None),
        ({"previous_response_id": "resp_0123456789abcdef01234567"}, openai.BadRequestError, "previous_response_not_found"),
    ]:
        try:
            program.responses.create(**{**program.asked, **fields})
        except kind as error:
            assert error.code and (code is None or error.code == code), error
            continue
        raise AssertionError(f"{fields} was served")


def models(program):
    listed = program.client.models.list().data
    assert [model.id for model in listed] == [program.model]
    assert program.client.models.retrieve(program.model).owned_by


def parse(program):
    parsed = program.responses.parse(**{**program.asked, "input": "Is Paris the capital of France?"}, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer), parsed


def parse_stream(program):
    with program.responses.stream(**program.asked, text_format=Answer) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def check_call(response):
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == 1 and calls[0].name == "get_weather", response.output
    assert json.loads(calls[0].arguments)["city"] in ("Oslo", "Rome"), calls
    return calls[0]


def output_of(call):
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]


def ws_tool(program):
    """A call and the answer to its output, chained on one socket."""
    with program.responses.connect() as connection:
        asked = {**program.asked, "tools": [WEATHER], "store": False}
        connection.response.create(**asked, tool_choice=FORCED)
        _, first = finish(connection)
        asked["input"] = output_of(check_call(first))
        connection.response.create(**asked, previous_response_id=first.id, tool_choice="none", max_output_tokens=40)
        text, second = finish(connection)
    assert text and second.previous_response_id == first.id, second


def http_tool(program):
    """The same over HTTP, with the whole history resent."""
    history = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {**program.asked, "tools": [WEATHER]}
    first = program.responses.create(**{**asked, "input": history}, tool_choice=FORCED)
    call = check_call(first)
    history += [item.to_dict() for item in first.output] + output_of(call)
    second = program.responses.create(**{**asked, "input": history}, tool_choice="none", max_output_tokens=40)
    assert second.output_text, second


def stream_tool(program):
    asked = {**program.asked, "tools": [WEATHER], "tool_choice": FORCED}
    with program.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        check_call(stream.get_final_response())
    assert "response.function_call_arguments.delta" in kinds, kinds


def ws_lanes(program):
    """Two lanes on one socket, each with its own answer."""
    with program.responses.connect() as connection:
        for lane in ("a", "b"):
            connection.send({"type": "response.create", **program.asked, "stream_id": lane})
        ended = {}
        for event in connection:
            data = event.to_dict()
            assert data["type"] != "error" and data["stream_id"] in ("a", "b"), data
            if data["type"] == "response.completed":
                ended[data["stream_id"]] = event.response
            if len(ended) == 2:
                break
    assert all("Paris" in response.output_text for response in ended.values())


def endpoints(program):
    made = program.responses.create(**program.asked)
    assert program.responses.retrieve(made.id).output_text == made.output_text
    items = program.responses.input_items.list(made.id).data
    assert len(items) == 1 and items[0].type == "message", items
    counted = program.responses.input_tokens.count(model=program.model, input=QUESTION, instructions=RULES)
    assert counted.input_tokens == made.usage.input_tokens, counted
    resumed = list(program.responses.retrieve(made.id, stream=True, starting_after=3))
    assert resumed[0].sequence_number == 4 and resumed[-1].type == "response.completed", resumed
    try:
        program.responses.cancel(made.id)
    except openai.BadRequestError:
        pass
    else:
        raise AssertionError("a response in the foreground was cancelled")
    program.responses.delete(made.id)
    try:
        program.responses.retrieve(made.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


def conversations(program):
    made = program.client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello."}])
    answer = program.responses.create(**program.asked, conversation=made.id)
    assert answer.conversation.id == made.id
    program.client.conversations.items.create(made.id, items=[{"type": "message", "role": "user", "content": "Bye."}])
    listed = program.client.conversations.items.list(made.id, order="asc").data
    assert [item.role for item in listed] == ["user", "user", "assistant", "user"], listed
    assert program.client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert program.client.conversations.delete(made.id).deleted


def compact(program):
    history = [{"role": "user", "content": "I moor at pier seven."}, {"role": "assistant", "content": "Noted."}]
    compacted = program.responses.compact(model=program.model, input=history)
    kept = [item.to_dict() for item in compacted.output]
    assert [item["type"] for item in kept].count("compaction") == 1, kept
    asked = {**program.asked, "input": [*kept, {"role": "user", "content": QUESTION}]}
    assert program.responses.create(**asked, max_output_tokens=24).output


def background(program):
    queued = program.responses.create(**program.asked, background=True)
    assert queued.status in ("queued", "in_progress"), queued
    while queued.status in ("queued", "in_progress"):
        queued = program.responses.retrieve(queued.id)
    check_text(queued)


CASES = {
    "json": json_answer, "sse": sse, "stream-helper": stream_helper, "ws-text": ws_text, "ws-chain": ws_chain,
    "ws-warm-up": ws_warm_up, "ws-error": ws_error, "errors": errors, "models": models, "parse": parse,
    "parse-stream": parse_stream, "ws-tool": ws_tool, "http-tool": http_tool, "stream-tool": stream_tool,
    "ws-lanes": ws_lanes, "endpoints": endpoints, "conversations": conversations, "compact": compact,
    "background": background,
}

if __name__ == "__main__":
    CASES[sys.argv[1]](Program(*sys.argv[2:4]))
