// OpenAI's JavaScript client against a running server: `node openai.mjs http://127.0.0.1:8000`.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { countRunning, runSuite, waitUntilIdle } from "./running.mjs";

const root = process.argv[2];
const model = "demo";
const client = new OpenAI({ baseURL: `${root}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is two plus two?" }];
const story = { model, prompt: "Once upon a time", temperature: 0, max_tokens: 12 };
const chat = { model, messages, temperature: 0, max_tokens: 24 };
const weather = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, hot: { type: "boolean" } },
  required: ["city", "hot"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters: weather } }];

async function collect(stream, read) {
  const pieces = [];
  for await (const chunk of stream) pieces.push(read(chunk));
  return pieces;
}

function checkWeather(text) {
  const found = JSON.parse(text);
  assert.deepEqual(Object.keys(found), ["city", "hot"]);
  assert.ok(["Paris", "Rome"].includes(found.city) && typeof found.hot === "boolean");
}

const tests = {
  async "chat and its usage"() {
    const answer = await client.chat.completions.create(chat);
    assert.ok(answer.choices[0].message.content.length > 0);
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
    assert.equal(prompt_tokens + completion_tokens, total_tokens);
  },

  async "a streamed chat is the same text"() {
    const whole = await client.chat.completions.create(chat);
    const stream = await client.chat.completions.create({
      ...chat, stream: true, stream_options: { include_usage: true },
    });
    const chunks = await collect(stream, (chunk) => chunk);
    const last = chunks.pop();
    assert.deepEqual(last.choices, []);
    assert.deepEqual(last.usage, whole.usage);
    assert.equal(chunks.map((c) => c.choices[0].delta.content ?? "").join(""), whole.choices[0].message.content);
    assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
    assert.deepEqual(chunks.at(-1).choices[0].delta, {});
  },

  async "the client's own reader of streams"() {
    const whole = await client.chat.completions.create(chat);
    const runner = client.chat.completions.stream(chat);
    assert.equal(await runner.finalContent(), whole.choices[0].message.content);
  },

  async "logprobs"() {
    const answer = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 });
    for (const token of answer.choices[0].logprobs.content) {
      assert.equal(token.top_logprobs.length, 2);
      assert.equal(token.logprob, token.top_logprobs[0].logprob);
    }
    const echo = await client.completions.create({ ...story, max_tokens: 1, echo: true, logprobs: 1 });
    const found = echo.choices[0].logprobs;
    assert.equal(found.tokens.length, echo.usage.prompt_tokens + 1);
    assert.equal(found.token_logprobs[0], null);
  },

  async "completions, prompts in lists, stop, seed, n"() {
    const answer = await client.completions.create(story);
    const many = await client.completions.create({ ...story, prompt: [story.prompt, "The dog"] });
    assert.equal(many.choices[0].text, answer.choices[0].text);
    const word = answer.choices[0].text.split(" ")[3];
    const cut = await client.completions.create({ ...story, stop: [word] });
    assert.ok(!cut.choices[0].text.includes(word));
    assert.equal(cut.choices[0].finish_reason, "stop");
    const hot = { ...story, temperature: 2, seed: 7, n: 3 };
    const [one, two] = await Promise.all([client.completions.create(hot), client.completions.create(hot)]);
    assert.deepEqual(one.choices.map((c) => c.text), two.choices.map((c) => c.text));
    assert.equal(one.choices.length, 3);
    const pieces = await collect(await client.completions.create({ ...story, stream: true }), (c) => c.choices[0].text);
    assert.equal(pieces.join(""), answer.choices[0].text);
  },

  async "vLLM's fields"() {
    const long = await client.completions.create({ ...story, max_tokens: 30, ignore_eos: true, top_k: 1 });
    assert.equal(long.usage.completion_tokens, 30);
    const form = { choice: ["Rome", "Paris"] };
    const answer = await client.completions.create({ ...story, structured_outputs: form });
    assert.ok(form.choice.includes(answer.choices[0].text));
  },

  async "structured outputs"() {
    const response_format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema: weather } };
    const answer = await client.chat.completions.parse({ ...chat, max_tokens: 64, response_format });
    checkWeather(answer.choices[0].message.content);
  },

  async "forced calls of tools, whole and in pieces"() {
    const body = { ...chat, max_tokens: 80, tools, parallel_tool_calls: false };
    for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
      const answer = await client.chat.completions.create({ ...body, tool_choice });
      const [call] = answer.choices[0].message.tool_calls;
      assert.equal(call.function.name, "get_weather");
      checkWeather(call.function.arguments);
      const final = await client.chat.completions.stream({ ...body, tool_choice }).finalMessage();
      assert.equal(final.tool_calls.length, 1);
      assert.equal(final.tool_calls[0].function.arguments, call.function.arguments);
    }
    const chosen = await client.chat.completions.create({ ...body, tool_choice: "auto" });
    const { content, tool_calls } = chosen.choices[0].message;
    assert.ok(content || tool_calls.length);
  },

  async "responses, whole and as events"() {
    const body = { model, input: "What is two plus two?", temperature: 0, max_output_tokens: 64 };
    const answer = await client.responses.create(body);
    assert.equal(answer.status, "completed");
    const stream = client.responses.stream(body);
    const deltas = [];
    stream.on("response.output_text.delta", (event) => deltas.push(event.delta));
    const final = await stream.finalResponse();
    assert.equal(final.output_text, answer.output_text);
    assert.equal(deltas.join(""), answer.output_text);
  },

  async "responses with tools, whole and as events"() {
    const flat = [...tools.map((tool) => ({ type: "function", ...tool.function })), { type: "custom", name: "note" }];
    const body = { model, input: "Paris?", temperature: 0, max_output_tokens: 80, tools: flat };
    for (const tool_choice of [{ type: "function", name: "get_weather" }, { type: "custom", name: "note" }]) {
      const [call] = (await client.responses.create({ ...body, tool_choice })).output;
      const written = tool_choice.type === "function" ? "arguments" : "input";
      assert.equal(call.name, tool_choice.name);
      if (written === "arguments") checkWeather(call.arguments);
      const stream = client.responses.stream({ ...body, tool_choice });
      const deltas = [];
      const event = written === "arguments" ? "function_call_arguments" : "custom_tool_call_input";
      stream.on(`response.${event}.delta`, ({ delta }) => deltas.push(delta));
      const [streamed] = (await stream.finalResponse()).output;
      assert.equal(streamed[written], call[written]);
      assert.equal(deltas.join(""), call[written]);
    }
  },

  async "embeddings"() {
    const input = ["Once upon a time", "The dog"];
    const packed = await client.embeddings.create({ model, input });
    const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
    assert.equal(packed.data.length, 2);
    packed.data.forEach((item, at) => {
      assert.equal(item.index, at);
      assert.ok(Math.abs(Math.hypot(...item.embedding) - 1) < 1e-5);
      assert.equal(item.embedding.length, plain.data[at].embedding.length);
      item.embedding.forEach((value, i) => assert.ok(Math.abs(value - plain.data[at].embedding[i]) < 1e-6));
    });
    const short = await client.embeddings.create({ model, input: input[0], dimensions: 8 });
    assert.equal(short.data[0].embedding.length, 8);
  },

  async "models"() {
    const page = await client.models.list();
    assert.deepEqual(page.data.map((each) => each.id), [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async "errors have the client's types"() {
    const kinds = [
      [{ ...chat, temperature: 1000 }, OpenAI.BadRequestError, "temperature", "invalid_value"],
      [{ ...chat, model: "another" }, OpenAI.NotFoundError, "model", "model_not_found"],
      [{ ...chat, best_friend: 1 }, OpenAI.BadRequestError, "best_friend", "unknown_parameter"],
    ];
    for (const [body, kind, param, code] of kinds) {
      for (const stream of [false, true]) {
        await assert.rejects(client.chat.completions.create({ ...body, stream }), (error) => {
          assert.ok(error instanceof kind);
          assert.deepEqual([error.param, error.code], [param, code]);
          return true;
        });
      }
    }
  },

  async "timeouts and aborted streams free the row"() {
    const long = { ...story, max_tokens: 900, ignore_eos: true };
    await assert.rejects(client.completions.create(long, { timeout: 300 }), OpenAI.APIConnectionTimeoutError);
    await waitUntilIdle(root);
    const stream = await client.completions.create({ ...long, stream: true });
    for await (const chunk of stream) {
      assert.ok(chunk.choices[0].text !== undefined);
      assert.equal(await countRunning(root), 1);
      break; // the client aborts a stream that is left
    }
    await waitUntilIdle(root);
  },

  async "many at once are what one is alone"() {
    const alone = (await client.completions.create(story)).choices[0].text;
    const texts = await Promise.all(Array.from({ length: 24 }, () => client.completions.create(story)));
    assert.deepEqual(new Set(texts.map((answer) => answer.choices[0].text)), new Set([alone]));
  },
};

await runSuite(tests);
