// Anthropic's JavaScript client against a running server: `node anthropic.mjs http://127.0.0.1:8000`.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { countRunning, runSuite, waitUntilIdle } from "./running.mjs";

const root = process.argv[2];
const client = new Anthropic({ baseURL: root, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is two plus two?" }];
const ask = { model: "demo", messages, temperature: 0, max_tokens: 64 };
const city = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [
  { name: "weather", description: "The weather.", input_schema: { ...city, additionalProperties: false } },
  { name: "now", input_schema: { type: "object", properties: {}, additionalProperties: false } },
];

const tests = {
  async "an answer and its usage"() {
    const answer = await client.messages.create(ask);
    assert.ok(answer.content[0].text.length > 0);
    assert.deepEqual([answer.type, answer.role, answer.stop_reason], ["message", "assistant", "end_turn"]);
    const { input_tokens } = await client.messages.countTokens({ model: "demo", messages });
    assert.equal(answer.usage.input_tokens + answer.usage.cache_read_input_tokens, input_tokens);
    assert.ok(answer.usage.output_tokens > 0);
  },

  async "a stream is the same answer"() {
    const whole = await client.messages.create(ask);
    const stream = client.messages.stream(ask);
    const deltas = [];
    stream.on("text", (delta) => deltas.push(delta));
    const final = await stream.finalMessage();
    assert.deepEqual(final.content.map(({ text }) => text), whole.content.map(({ text }) => text));
    assert.equal(deltas.join(""), whole.content[0].text);
    assert.deepEqual([final.stop_reason, final.usage.output_tokens], ["end_turn", whole.usage.output_tokens]);
  },

  async "system blocks, and an answer that is begun"() {
    const system = [{ type: "text", text: "Be brief.", cache_control: { type: "ephemeral" } }];
    const blocks = await client.messages.create({ ...ask, system });
    const text = await client.messages.create({ ...ask, system: "Be brief." });
    assert.deepEqual(blocks.content, text.content);
    const whole = (await client.messages.create(ask)).content[0].text;
    const begun = whole.split(" ").slice(0, 3).join(" ");
    const more = await client.messages.create({
      ...ask, messages: [...messages, { role: "assistant", content: begun }],
    });
    assert.equal(begun + more.content[0].text, whole);
  },

  async "forced calls, whole and in pieces"() {
    for (const tool_choice of [{ type: "any" }, { type: "tool", name: "weather" }]) {
      const body = { ...ask, tools, tool_choice: { ...tool_choice, disable_parallel_tool_use: true } };
      const whole = await client.messages.create(body);
      assert.deepEqual([whole.stop_reason, whole.content.length], ["tool_use", 1]);
      const [call] = whole.content;
      assert.ok(["weather", "now"].includes(call.name));
      if (call.name === "weather") assert.ok(["Paris", "Rome"].includes(call.input.city));
      const stream = client.messages.stream(body);
      const parts = [];
      stream.on("inputJson", (part) => parts.push(part));
      const [streamed] = (await stream.finalMessage()).content;
      assert.deepEqual([streamed.name, streamed.input], [call.name, call.input]);
      assert.deepEqual(JSON.parse(parts.join("")), call.input);
    }
  },

  async "a form is enforced"() {
    const format = { type: "json_schema", schema: { ...city, additionalProperties: false } };
    const answer = await client.messages.create({ ...ask, output_config: { format } });
    assert.ok(["Paris", "Rome"].includes(JSON.parse(answer.content[0].text).city));
  },

  async "reasons to stop"() {
    const word = (await client.messages.create(ask)).content[0].text.split(" ")[2];
    const cut = await client.messages.create({ ...ask, stop_sequences: ["never", word] });
    assert.deepEqual([cut.stop_reason, cut.stop_sequence], ["stop_sequence", word]);
    const final = await client.messages.stream({ ...ask, stop_sequences: [word] }).finalMessage();
    assert.deepEqual([final.stop_reason, final.stop_sequence], ["stop_sequence", word]);
    assert.equal((await client.messages.create({ ...ask, max_tokens: 3 })).stop_reason, "max_tokens");
  },

  async "a stream that is left frees the row"() {
    const stream = client.messages.stream({ ...ask, max_tokens: 900, ignore_eos: true });
    for await (const event of stream) {
      if (event.type !== "content_block_delta") continue;
      assert.equal(await countRunning(root), 1);
      break; // the client aborts a stream that is left
    }
    await waitUntilIdle(root);
  },

  async "errors have the client's types"() {
    const unknown = { type: "tool", name: "nope" };
    const kinds = [
      [{ ...ask, model: "another" }, Anthropic.NotFoundError, "not_found_error"],
      [{ ...ask, temperature: 1000 }, Anthropic.BadRequestError, "invalid_request_error"],
      [{ ...ask, tools, tool_choice: unknown }, Anthropic.BadRequestError, "invalid_request_error"],
    ];
    for (const [body, kind, type] of kinds) {
      for (const stream of [false, true]) {
        await assert.rejects(client.messages.create({ ...body, stream }), (error) => {
          assert.ok(error instanceof kind);
          assert.equal(error.error.error.type, type);
          return true;
        });
      }
    }
  },
};

await runSuite(tests);
