// Calls that the model chooses, to the end, by OpenAI's and Anthropic's JavaScript clients:
// `node chosen.mjs URL SCENARIO`: a server that answers from the script of tests/scripted/scenario.py, and that as JSON.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { runSuite } from "./running.mjs";

const root = process.argv[2];
const scenario = JSON.parse(process.argv[3]);
const options = { apiKey: "none", maxRetries: 0 };
const openai = new OpenAI({ baseURL: `${root}/v1`, ...options });
const anthropic = new Anthropic({ baseURL: root, ...options });
const question = { role: "user", content: scenario.ask };
const model = "demo";

function checkCalls(calls) {
  assert.deepEqual(calls, scenario.calls);
}

const tests = {};
for (const stream of [false, true]) {
  const kind = stream ? "in pieces" : "whole";

  tests[`chat, ${kind}`] = async () => {
    const calls = [];
    const tools = scenario.functions.map((each) => {
      const run = (given) => {
        calls.push([each.name, given]);
        return scenario.results[each.name];
      };
      return { type: "function", function: { ...each, parse: JSON.parse, function: run } };
    });
    const runner = openai.chat.completions.runTools({ model, messages: [question], tools, stream });
    assert.equal(await runner.finalContent(), scenario.answer);
    checkCalls(calls);
    const [, called] = runner.messages;
    assert.equal(called.reasoning, scenario.reasoning);
    assert.ok((await runner.finalChatCompletion()).usage !== undefined || stream);
  };

  tests[`responses, ${kind}`] = async () => {
    const tools = scenario.functions.map((each) => ({ type: "function", strict: true, ...each }));
    const ask = async (input) => {
      const body = { model, input, tools };
      return stream ? openai.responses.stream(body).finalResponse() : openai.responses.create(body);
    };
    const called = await ask([question]);
    const [thought, ...calls] = called.output;
    checkCalls(calls.map((call) => [call.name, JSON.parse(call.arguments)]));
    assert.equal(thought.content[0].text, scenario.reasoning);
    const results = calls.map(({ call_id, name }) => ({
      type: "function_call_output", call_id, output: scenario.results[name],
    }));
    const answer = await ask([question, ...called.output, ...results]);
    assert.equal(answer.output_text, scenario.answer);
    assert.ok(answer.usage.input_tokens_details.cached_tokens > 0);
  };

  tests[`messages, ${kind}`] = async () => {
    const calls = [];
    const tools = scenario.functions.map(({ parameters, ...each }) => ({
      ...each,
      input_schema: parameters,
      run: (given) => {
        calls.push([each.name, given]);
        return scenario.results[each.name];
      },
    }));
    const body = { model, max_tokens: 300, thinking: { type: "adaptive" }, messages: [question], tools, stream };
    const runner = anthropic.beta.messages.toolRunner(body);
    const answer = await runner.runUntilDone();
    checkCalls(calls);
    assert.deepEqual(answer.content.map(({ type }) => type), ["thinking", "text"]);
    assert.equal(answer.content[1].text, scenario.answer);
    assert.ok(answer.usage.cache_read_input_tokens > 0);
  };
}

await runSuite(tests);
