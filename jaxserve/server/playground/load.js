// "Send 40 at once": enough short prompts to see rows join and leave.

import { ask, readEvents } from "./api.js";

// Browsers open six connections to a server. The live view and the chat need one each, so the forty prompts travel in
// four requests; every prompt is a sequence of its own in the engine. Each request has its own least and most tokens,
// and between them its sequences end where they like, so that rows become free at different times.
const LIMITS = [[12, 64], [64, 128], [144, 256], [256, 480]];
const EACH = 10;
const NAMES = ["Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Leslie", "Frances"];
const QUESTIONS = [
  "What is continuous batching?", "What is a KV cache?", "What does TTFT mean?", "What is prefill?",
  "Why are KV caches divided into pages?", "What is preemption?", "What is prefix caching?",
];
const pick = (items) => items[Math.floor(Math.random() * items.length)];
const number = (low, high) => low + Math.floor(Math.random() * (high - low));
const MAKERS = [
  () => pick(QUESTIONS),
  () => "Tell me a short story.",
  () => `What is ${number(10, 999)} + ${number(10, 999)}?`,
  () => `Turn this into JSON: name: ${pick(NAMES)}, age: ${number(18, 90)}`,
];

const button = document.getElementById("load");
const note = document.getElementById("load-note");
let running = null;

export const isLoading = () => running !== null;
export const stopLoad = () => running?.abort();

/** `readModels` returns the names of all models, none while unknown, and the tokens of their context or null. */
export function setUpLoad(readModels) {
  button.addEventListener("click", () => (running ? stopLoad() : sendAll(readModels())));
}

async function sendAll({ models, context }) {
  const controller = new AbortController();
  running = controller;
  button.textContent = "Stop them";
  const total = LIMITS.length * EACH;
  let done = 0;
  const show = () => { note.textContent = `${done} of ${total} finished`; };
  show();
  const results = await Promise.allSettled(LIMITS.map(async (limits, at) => {
    const model = models[at % models.length]; // each in turn: all of them share the steps
    const questions = Array.from({ length: EACH }, (_, each) => MAKERS[each % MAKERS.length]());
    const prompt = await render(questions, model, controller.signal);
    const [least, most] = limits.map((limit) => Math.min(limit, Math.floor((context ?? 4096) / 4)));
    const body = { model, prompt, min_tokens: least, max_tokens: most, temperature: 1, stream: true };
    for await (const event of readEvents(await ask("v1/completions", { body, signal: controller.signal }))) {
      for (const choice of event.choices ?? []) if (choice.finish_reason) done += 1;
      show();
    }
  }));
  const failed = results.find((result) => result.status === "rejected");
  if (controller.signal.aborted) note.textContent = `stopped; ${done} of ${total} finished`;
  else if (failed) note.textContent = `${done} of ${total} finished; ${failed.reason.message}`;
  running = null;
  button.textContent = "Send 40 at once";
}

/** Returns the prompts as the model's chat template has them, in tokens; as text where the server tells no tokens. */
async function render(questions, model, signal) {
  try {
    const prompts = [];
    for (const content of questions) {
      const body = { model, messages: [{ role: "user", content }] };
      prompts.push((await (await ask("tokenize", { body, signal })).json()).tokens);
    }
    return prompts.every(Array.isArray) ? prompts : questions;
  } catch (error) {
    if (error.name === "AbortError" || error.status === 401) throw error;
    return questions;
  }
}
