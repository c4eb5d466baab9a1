// What a program does with openai-node: one case a run, `node node_client.mjs CASE BASE_URL MODEL`. Throws when it fails.
// Run it in the folder whose node_modules has the pinned packages.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [name, baseURL, model] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const load = (module) => import(pathToFileURL(require.resolve(module)));
const { OpenAI } = await load("openai");
const { ResponsesWS } = await load("openai/resources/responses/ws");

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const asked = {
  model, input: "What is the capital of France?", instructions: "You are a helpful assistant.", temperature: 0,
};
const weather = {
  type: "function", name: "get_weather", description: "The weather of a city", strict: true,
  parameters: {
    type: "object", properties: { city: { type: "string", enum: ["Oslo", "Rome"] } }, required: ["city"],
    additionalProperties: false,
  },
};
const forced = { type: "function", name: "get_weather" };
const schema = {
  type: "object", properties: { city: { type: "string" }, capital: { type: "boolean" } },
  required: ["city", "capital"], additionalProperties: false,
};

function checkText(response) {
  assert.equal(response.status, "completed");
  assert.match(response.output_text ?? response.output[0].content[0].text, /Paris/);
  assert.equal(response.usage.total_tokens, response.usage.input_tokens + response.usage.output_tokens);
}

function checkCall(response) {
  const calls = response.output.filter((item) => item.type === "function_call");
  assert.equal(calls.length, 1);
  assert.equal(calls[0].name, "get_weather");
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(calls[0].arguments).city));
  return calls[0];
}

const outputOf = (call) => [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }];

/** A socket, and the rest of one response after another. */
class Turns {
  constructor() {
    this.socket = new ResponsesWS(client);
    this.waiting = null;
    this.socket.on("event", (event) => this.take(event));
    this.socket.on("error", (error) => this.waiting?.reject(error));
  }

  take(event) {
    if (event.type === "error") return;
    assert.equal(event.sequence_number, this.next, event.type);
    this.next += 1;
    if (event.type === "response.output_text.delta") this.text += event.delta;
    if (["response.completed", "response.incomplete", "response.failed"].includes(event.type)) {
      this.waiting.resolve(event.response);
    }
  }

  ask(fields) {
    this.next = 0;
    this.text = "";
    return new Promise((resolve, reject) => {
      this.waiting = { resolve, reject };
      this.socket.send({ type: "response.create", ...asked, ...fields });
    });
  }

  close() {
    this.socket.close();
  }
}

async function onSocket(program) {
  const turns = new Turns();
  try {
    await program(turns);
  } finally {
    turns.close();
  }
}

const cases = {
  json: async () => checkText(await client.responses.create(asked)),

  sse: async () => {
    let next = 0, text = "", last;
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      assert.equal(event.sequence_number, next++);
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    assert.equal(last.type, "response.completed");
    assert.equal(last.response.output[0].content[0].text, text);
    checkText(last.response);
  },

  "stream-helper": async () => {
    const kinds = [];
    const stream = client.responses.stream(asked).on("event", (event) => kinds.push(event.type));
    checkText(await stream.finalResponse());
    assert.equal(kinds[0], "response.created");
  },

  "ws-text": () => onSocket(async (turns) => {
    const response = await turns.ask({});
    assert.equal(response.output[0].content[0].text, turns.text);
    checkText(response);
  }),

  "ws-chain": () => onSocket(async (turns) => {
    let parent, held = 0;
    for (const input of ["Hello!", "What is the capital of France?", "And of Italy?", "Goodbye!"]) {
      const fields = { input, store: false, max_output_tokens: 24 };
      if (parent) fields.previous_response_id = parent;
      const response = await turns.ask(fields);
      assert.equal(response.previous_response_id, parent ?? null);
      assert.ok(response.usage.input_tokens > held);
      held = response.usage.total_tokens;
      parent = response.id;
    }
  }),

  "ws-error": () => onSocket(async (turns) => {
    const bad = turns.ask({ previous_response_id: "resp_0123456789abcdef01234567" });
    await assert.rejects(bad, (error) => JSON.stringify(error.error ?? error).includes("previous_response_not_found"));
    checkText(await turns.ask({}));
  }),

  errors: async () => {
    for (const [fields, status, code] of [
      [{ model: "no-such-model" }, 404, "model_not_found"],
      [{ previous_response_id: "resp_0123456789abcdef01234567" }, 400, "previous_response_not_found"],
    ]) {
      const refused = client.responses.create({ ...asked, ...fields });
      await assert.rejects(refused, (error) => error.status === status && error.code === code);
    }
  },

  models: async () => {
    const ids = [];
    for await (const listed of client.models.list()) ids.push(listed.id);
    assert.deepEqual(ids, [model]);
  },

  parse: async () => {
    const text = { format: { type: "json_schema", name: "answer", strict: true, schema } };
    const parsed = await client.responses.parse({ ...asked, text });
    const answer = JSON.parse(parsed.output_text);
    assert.deepEqual(Object.keys(answer).sort(), ["capital", "city"]);
  },

  "ws-tool": () => onSocket(async (turns) => {
    const first = await turns.ask({ tools: [weather], tool_choice: forced, store: false });
    const call = checkCall(first);
    const second = await turns.ask({
      tools: [weather], tool_choice: "none", store: false, previous_response_id: first.id, input: outputOf(call),
      max_output_tokens: 40,
    });
    assert.ok(turns.text);
    assert.equal(second.previous_response_id, first.id);
  }),

  "http-tool": async () => {
    const input = [{ role: "user", content: "What is the weather in Oslo?" }];
    const first = await client.responses.create({ ...asked, input, tools: [weather], tool_choice: forced });
    input.push(...first.output, ...outputOf(checkCall(first)));
    const fields = { input, tools: [weather], tool_choice: "none", max_output_tokens: 40 };
    assert.ok((await client.responses.create({ ...asked, ...fields })).output_text);
  },

  "stream-tool": async () => {
    const stream = client.responses.stream({ ...asked, tools: [weather], tool_choice: forced });
    checkCall(await stream.finalResponse());
  },

  "ws-lanes": async () => {
    const socket = new ResponsesWS(client);
    const ended = {};
    await new Promise((resolve, reject) => {
      socket.on("error", reject);
      socket.on("event", (event) => {
        if (event.type !== "response.completed") return;
        ended[event.stream_id] = event.response;
        if (Object.keys(ended).length === 2) resolve();
      });
      for (const lane of ["a", "b"]) socket.send({ type: "response.create", ...asked, stream_id: lane });
    }).finally(() => socket.close());
    Object.values(ended).forEach(checkText);
  },

  endpoints: async () => {
    const made = await client.responses.create(asked);
    assert.equal((await client.responses.retrieve(made.id)).id, made.id);
    const items = [];
    for await (const item of client.responses.inputItems.list(made.id)) items.push(item);
    assert.equal(items.length, 1);
    const { model: id, input, instructions } = asked;
    const counted = await client.responses.inputTokens.count({ model: id, input, instructions });
    assert.equal(counted.input_tokens, made.usage.input_tokens);
    const resumed = await client.responses.retrieve(made.id, { stream: true, starting_after: 3 });
    let first;
    for await (const event of resumed) first ??= event;
    assert.equal(first.sequence_number, 4);
    await client.responses.delete(made.id);
    await assert.rejects(client.responses.retrieve(made.id), (error) => error.status === 404);
  },

  conversations: async () => {
    const made = await client.conversations.create({ items: [{ type: "message", role: "user", content: "Hello." }] });
    const answer = await client.responses.create({ ...asked, conversation: made.id });
    assert.equal(answer.conversation.id, made.id);
    const listed = [];
    for await (const item of client.conversations.items.list(made.id, { order: "asc" })) listed.push(item.role);
    assert.deepEqual(listed, ["user", "user", "assistant"]);
    assert.ok((await client.conversations.delete(made.id)).deleted);
  },

  compact: async () => {
    const input = [{ role: "user", content: "I moor at pier seven." }, { role: "assistant", content: "Noted." }];
    const compacted = await client.responses.compact({ model, input });
    assert.equal(compacted.output.filter((item) => item.type === "compaction").length, 1);
    const next = [...compacted.output, { role: "user", content: asked.input }];
    assert.ok((await client.responses.create({ ...asked, input: next, max_output_tokens: 24 })).output.length);
  },

  background: async () => {
    let response = await client.responses.create({ ...asked, background: true });
    while (["queued", "in_progress"].includes(response.status)) response = await client.responses.retrieve(response.id);
    checkText(response);
  },
};

if (!cases[name]) throw new Error(`no case ${name}: ${Object.keys(cases)}`);
await cases[name]();
process.exit(0);
