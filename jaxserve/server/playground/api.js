// The way to the server: the key, errors in OpenAI's shape, and server-sent events.

const KEY = "jaxserve.key";

export function readKey() {
  try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; }
}

export function storeKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch { /* a browser without storage asks again after a reload */ }
}

/** What a server answered instead of what was asked for. Status 0: it did not answer. */
export class ApiError extends Error {
  constructor(status, error = {}, retryAfter = null) {
    super(typeof error.message === "string" && error.message ? error.message : `The server answered with status ${status}.`);
    Object.assign(this, { status, retryAfter, type: error.type, param: error.param, code: error.code });
  }
}

/** Fetches a path with the key; throws an ApiError unless the answer is a good one. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = readKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached." });
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-wanted", { detail: Boolean(key) }));
  throw new ApiError(response.status, found?.error ?? {}, response.headers.get("retry-after"));
}

/** Yields the data of each event, parsed, until the stream ends or says [DONE]; an error event is thrown. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const text = line.endsWith("\r") ? line.slice(0, -1) : line;
        if (text.startsWith("data:")) data.push(text.slice(text[5] === " " ? 6 : 5));
        if (text !== "" || data.length === 0) continue;
        const whole = data.join("\n");
        data = [];
        if (whole === "[DONE]") return;
        const event = JSON.parse(whole);
        if (event.error) throw new ApiError(200, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
