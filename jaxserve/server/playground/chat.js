// The conversation: one answer at a time, streamed, measured here in the browser.

import { ApiError, ask, readEvents } from "./api.js";
import { showMarkdown } from "./markdown.js";
import { readSettings, readSystem } from "./settings.js";
import { gatherCalls, runCall, writeCalls } from "./tools.js";

const find = (id) => document.getElementById(id);
const [log, list, prompt, send, stop] = ["log", "turns", "prompt", "send", "stop"].map(find);
const turns = []; // {role, text, element, ...}; a user's turn, then its answer
const MAX_CALLS = 8; // answers to one question that call tools, before the page waits for its user
let model = null;
let running = null; // the AbortController of the answer that is being written
let follows = true; // whether the log keeps to its end
let announce = () => {};

export const setModel = (name) => { model = name; };
export const isAnswering = () => running !== null;
export const stopAnswer = () => running?.abort();

/** Returns the request for the conversation as it is, with `draft` as its last message, or for what it waits for now. */
export function compose(draft = null) {
  const messages = [];
  const system = readSystem();
  if (system) messages.push({ role: "system", content: system });
  const rounds = []; // a question, and the answers to it: all but the last one are calls
  for (const turn of turns) {
    if (turn.role === "user") rounds.push([turn]);
    else rounds.at(-1).push(turn);
  }
  rounds.forEach((round, at) => {
    // A question that got no answer is left out: many templates insist on roles that take turns.
    const isAnswered = round.at(-1).text && !round.some((turn) => turn.failed);
    if (isAnswered || (draft === null && at === rounds.length - 1)) messages.push(...round.flatMap(writeTurn));
  });
  if (draft !== null) messages.push({ role: "user", content: draft });
  const body = { messages, ...readSettings(), stream: true, stream_options: { include_usage: true } };
  return model === null ? body : { model, ...body };
}

const writeTurn = (turn) => (turn.calls?.length
  ? writeCalls(turn.text, turn.calls) : [{ role: turn.role, content: turn.text }]);

export function setUpChat(say) {
  announce = say;
  find("send-form").addEventListener("submit", (event) => { event.preventDefault(); submit(prompt.value); });
  prompt.addEventListener("input", fitPrompt);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit(prompt.value);
  });
  stop.addEventListener("click", stopAnswer);
  find("clear").addEventListener("click", clear);
  find("ideas").addEventListener("click", (event) => {
    if (event.target.tagName === "BUTTON") submit(event.target.textContent);
  });
  let top = 0;
  log.addEventListener("scroll", () => {
    // Only who scrolls up wants to stay: the end also moves away by itself, when text comes.
    if (log.scrollTop < top) follows = false;
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 40) follows = true;
    top = log.scrollTop;
  });
  new ResizeObserver(scroll).observe(log);
}

function submit(text) {
  if (running || !text.trim()) return;
  prompt.value = "";
  fitPrompt();
  find("empty").hidden = true;
  addTurn("user", text);
  answer();
}

function clear() {
  stopAnswer();
  turns.length = 0;
  list.replaceChildren();
  find("empty").hidden = false;
  prompt.focus();
}

/** Asks again for the last answer. */
export function regenerate() {
  if (running || turns.at(-1)?.role !== "assistant") return;
  turns.pop().element.remove();
  prompt.focus();
  answer();
}

/** Asks again for the last answer if it was refused with this status. */
export function retryAfter(status) {
  if (turns.at(-1)?.status === status) regenerate();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function make(tag, name, text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return element;
}

function addTurn(role, text = "") {
  const element = make("li", `turn ${role}`);
  const body = make("div");
  const content = document.createTextNode(text); // always a text node: nothing of a model is ever markup
  const shown = make("div", "text");
  shown.append(content);
  body.append(shown);
  element.append(make("p", "who", role === "user" ? "you" : model ?? "model"), body);
  for (const old of list.querySelectorAll(".again")) old.remove();
  list.append(element);
  const turn = { role, text, element, body, shown, content };
  turns.push(turn);
  follows = true;
  scroll();
  return turn;
}

let isScrolling = false;
function scroll() {
  if (isScrolling || !follows) return;
  isScrolling = true;
  requestAnimationFrame(() => { isScrolling = false; if (follows) log.scrollTop = log.scrollHeight; });
}

const countAnswers = () => turns.length - 1 - turns.findLastIndex((turn) => turn.role === "user");

async function answer() {
  let body = null;
  let wrong = null;
  try { body = compose(); } catch (error) { wrong = error; }
  const turn = addTurn("assistant");
  const facts = { started: performance.now(), first: null, last: null, pieces: 0, usage: null, reason: null };
  const controller = new AbortController();
  running = controller;
  turn.element.classList.add("busy");
  showBusy(true);
  try {
    if (wrong) throw wrong;
    await stream(body, turn, facts, controller.signal);
  } catch (error) {
    if (controller.signal.aborted) facts.reason = "stopped";
    else { turn.failed = true; showError(turn, error); }
  } finally {
    if (running === controller) running = null;
    turn.element.classList.remove("busy");
    showBusy(running !== null);
    finish(turn, facts);
  }
  if (facts.reason === "tool_calls" && turns.at(-1) === turn && countAnswers() < MAX_CALLS) answer();
}

async function stream(body, turn, facts, signal) {
  const response = await ask("v1/chat/completions", { body, signal });
  for await (const event of readEvents(response)) {
    if (event.usage) facts.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    facts.reason = choice.finish_reason ?? facts.reason;
    const { content, reasoning_content: reasoning, tool_calls: pieces } = choice.delta ?? {};
    if (!content && !reasoning && !pieces) continue;
    facts.last = performance.now();
    facts.first ??= facts.last;
    facts.pieces += 1;
    if (reasoning) addReasoning(turn, reasoning);
    if (pieces) addCalls(turn, pieces);
    if (content) { turn.text += content; turn.content.appendData(content); }
    scroll();
  }
}

function addReasoning(turn, text) {
  if (!turn.reasoning) {
    const details = make("details", "reasoning");
    turn.reasoning = document.createTextNode("");
    const shown = make("p");
    shown.append(turn.reasoning);
    details.append(make("summary", "", "Reasoning"), shown);
    turn.shown.before(details);
  }
  turn.reasoning.appendData(text);
}

function addCalls(turn, pieces) {
  for (const call of gatherCalls(turn.calls ??= [], pieces)) {
    const [box, shown] = [make("div", "call"), make("code")];
    call.shown = document.createTextNode("");
    shown.append(call.shown);
    box.append(make("b", "", call.name), shown);
    turn.body.append(box);
    call.box = box;
  }
  for (const call of turn.calls) call.shown.data = call.text;
}

/** Runs the calls of a complete answer; those of another are shown, but not sent again. */
function runCalls(turn, facts) {
  if (facts.reason !== "tool_calls") {
    turn.calls = null;
    return;
  }
  for (const call of turn.calls) {
    call.result = runCall(call);
    call.box.append(make("span", "result", call.result));
  }
}

function showBusy(isBusy) {
  const had = document.activeElement === stop || document.activeElement === send;
  send.hidden = isBusy;
  stop.hidden = !isBusy;
  if (had) (isBusy ? stop : prompt).focus();
}

const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const ENDS = { stop: "ended by itself", length: "cut at max_tokens", stopped: "stopped", tool_calls: "calls a tool" };

function finish(turn, facts) {
  const hasCalls = turn.calls?.length > 0;
  if (hasCalls) runCalls(turn, facts);
  const line = make("div", "facts");
  const tokens = facts.usage?.completion_tokens;
  if (tokens !== undefined) line.append(make("span", "tokens", count(tokens, "token")));
  else if (facts.pieces) line.append(make("span", "tokens", count(facts.pieces, "piece")));
  const seconds = (facts.last - facts.first) / 1000;
  // The first token is TTFT's; the rate is of those after it.
  if (tokens > 1 && seconds > 0) line.append(make("span", "rate", `${Math.round((tokens - 1) / seconds).toLocaleString("en")} tokens/s`));
  if (facts.first !== null) line.append(make("span", "ttft", `TTFT ${Math.round(facts.first - facts.started)} ms`));
  if (facts.reason) line.append(make("span", "reason", ENDS[facts.reason] ?? facts.reason));
  if (!turn.failed) line.append(makeAgain("Regenerate"));
  if (line.childElementCount) turn.body.append(line);
  if (turn.text) {
    turn.shown.replaceChildren(...showMarkdown(turn.text)); // once it is complete: a mark may be half there before
    turn.shown.classList.add("shaped");
  }
  if (hasCalls && !turn.text) turn.shown.hidden = true;
  else if (!turn.text && !turn.failed && facts.reason !== "stopped") turn.shown.append(make("em", "", "(empty)"));
  announce(turn.failed ? "The request failed." : `Answer ${facts.reason === "stopped" ? "stopped" : "complete"}.`);
  scroll();
}

function makeAgain(text) {
  const again = make("button", "again quiet", text);
  again.type = "button";
  again.addEventListener("click", regenerate);
  return again;
}

function showError(turn, error) {
  turn.status = error.status;
  const box = make("div", "error");
  box.setAttribute("role", "alert");
  box.append(make("b", "", error.status === 401 ? "This server wants an API key." : "The request failed."));
  box.append(make("span", "message", error.message));
  if (error instanceof ApiError) {
    const where = [error.status >= 400 ? `HTTP ${error.status}` : "", error.type, error.param && `param ${error.param}`, error.code];
    box.append(make("div", "where", where.filter(Boolean).join(", ")));
    if (error.retryAfter) box.append(make("div", "where", `try again after ${error.retryAfter} s`));
  }
  const again = makeAgain("Try again");
  again.classList.remove("quiet");
  box.append(again);
  turn.body.append(box);
  if (!turn.text) turn.shown.hidden = true;
}
