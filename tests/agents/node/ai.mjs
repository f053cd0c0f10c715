// Vercel's `ai` against two running servers: `node ai.mjs URL_OF_THE_SCRIPT URL_OF_THE_DEMO SCENARIO`, which is JSON.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { runSuite, waitUntilIdle } from "../../server/node/running.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [scripted, demo] = process.argv.slice(2, 4);
const scenario = JSON.parse(process.argv[4]);
const apiKey = "none";
const providerOptions = { openai: { store: false } }; // else Responses gets references to items that no one stored
const createCompatible = (options) =>
  createOpenAICompatible({ name: "jaxserve", includeUsage: true, supportsStructuredOutputs: true, ...options });
const connect = {
  responses: (root) => createOpenAI({ baseURL: `${root}/v1`, apiKey }).responses("demo"),
  chat: (root) => createOpenAI({ baseURL: `${root}/v1`, apiKey }).chat("demo"),
  compatible: (root) => createCompatible({ baseURL: `${root}/v1`, apiKey }).chatModel("demo"),
  messages: (root) => createAnthropic({ baseURL: `${root}/v1`, apiKey })("demo"),
};
const city = z.strictObject({ city: z.enum(["Paris", "Rome"]) });
const nothing = z.strictObject({});
const tools = {
  get_weather: tool({
    description: "The weather in a city.", inputSchema: city, execute: async () => scenario.results.get_weather,
  }),
  get_time: tool({ description: "The time.", inputSchema: nothing, execute: async () => scenario.results.get_time }),
};
const bare = Object.fromEntries(Object.entries(tools).map(([name, { execute, ...rest }]) => [name, tool(rest)]));

async function checkTools(result, api) {
  assert.equal(await result.text, scenario.answer);
  const [first, last] = await result.steps;
  assert.deepEqual(first.toolCalls.map((call) => [call.toolName, call.input]), scenario.calls);
  assert.deepEqual(first.toolResults.map(({ output }) => output), Object.values(scenario.results));
  assert.deepEqual([first.finishReason, last.finishReason], ["tool-calls", "stop"]);
  if (["compatible", "messages"].includes(api)) assert.equal(first.reasoningText, scenario.reasoning);
  const { inputTokens, outputTokens, totalTokens, cachedInputTokens } = last.usage;
  assert.equal(inputTokens + outputTokens, totalTokens);
  assert.ok(cachedInputTokens > 0 && cachedInputTokens < inputTokens);
}

const tests = {};
for (const [api, model] of Object.entries(connect)) {
  const shared = { maxRetries: 0, providerOptions };
  const ask = { ...shared, model: model(scripted), prompt: scenario.ask, tools, stopWhen: stepCountIs(4) };
  const forced = { ...shared, model: model(demo), prompt: "Paris?", temperature: 0, maxOutputTokens: 200 };

  tests[`${api}: two tools to the end`] = async () => checkTools(await generateText(ask), api);

  tests[`${api}: the same in pieces`] = async () => {
    const result = streamText(ask);
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    assert.equal(pieces.join(""), scenario.answer);
    await checkTools(result, api);
  };

  tests[`${api}: forced calls of the demo model`] = async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
      const { toolCalls } = await generateText({ ...forced, tools: bare, toolChoice });
      const [call] = toolCalls;
      assert.ok(toolChoice === "required" || call.toolName === "get_weather");
      (call.toolName === "get_weather" ? city : nothing).parse(call.input);
      const [streamed] = await streamText({ ...forced, tools: bare, toolChoice }).toolCalls;
      assert.deepEqual([streamed.toolName, streamed.input], [call.toolName, call.input]);
    }
  };

  tests[`${api}: a form of the demo model`] = async () => {
    city.parse((await generateObject({ ...forced, schema: city })).object);
  };

  tests[`${api}: stop sequences`] = async () => {
    if (api === "responses") return; // it has none
    const cut = await generateText({ ...ask, prompt: scenario.list, stopSequences: [scenario.stop] });
    assert.deepEqual([cut.text.replace(/[, ]+$/, ""), cut.finishReason], [scenario.cut, "stop"]);
  };

  tests[`${api}: a stream that is left`] = async () => {
    const controller = new AbortController();
    const stream = streamText({ ...ask, prompt: scenario.count, abortSignal: controller.signal });
    for await (const piece of stream.textStream) {
      assert.ok(piece.length > 0);
      break;
    }
    controller.abort();
    await waitUntilIdle(scripted);
  };
}

await runSuite(tests);
