// The fields of the settings form, as fields of a request. What is left empty is not sent.

import { TOOLS } from "./tools.js";

const STORE = "jaxserve.settings";
const FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const INTEGERS = ["top_k", "max_tokens", "seed"];

const form = document.getElementById("fields");
const chosen = document.getElementById("chosen");
const schemaField = document.getElementById("schema-field");
const value = (name) => form.elements[name].value;

/** Returns the sampling fields of a request. Throws an Error that names the field when one cannot be read. */
export function readSettings() {
  const body = {};
  for (const name of [...FLOATS, ...INTEGERS]) {
    const input = form.elements[name];
    if (input.validity.badInput) throw new Error(`${name} must be a number.`);
    if (input.value !== "") body[name] = Number(input.value);
  }
  const stop = value("stop").split("\n").filter(Boolean).map(unescape);
  if (stop.length) body.stop = stop;
  if (value("form") === "json_object") body.response_format = { type: "json_object" };
  if (value("form") === "json_schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "playground", schema: readSchema() } };
  }
  if (value("tools")) body.tools = TOOLS;
  return body;
}

export const readSystem = () => value("system").trim();

function readSchema() {
  try {
    return JSON.parse(value("schema"));
  } catch (error) {
    throw new Error(`The JSON schema is not valid JSON: ${error.message}`);
  }
}

/** \n, \t and \\ as a program would write them: a line of the field cannot hold a line break. */
const unescape = (text) => text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);

function summarize() {
  const parts = [...FLOATS, ...INTEGERS].filter((name) => value(name) !== "").map((name) => `${name} ${value(name)}`);
  if (readSystem()) parts.unshift("system");
  if (value("stop").trim()) parts.push("stop");
  if (value("form")) parts.push(value("form"));
  if (value("tools")) parts.push("tools");
  chosen.textContent = parts.join(", ") || "the model's defaults";
  schemaField.hidden = value("form") !== "json_schema";
}

function store() {
  try { sessionStorage.setItem(STORE, JSON.stringify(Object.fromEntries(new FormData(form)))); } catch { /* not kept */ }
}

function restore() {
  try {
    for (const [name, text] of Object.entries(JSON.parse(sessionStorage.getItem(STORE) ?? "{}"))) {
      if (form.elements[name]) form.elements[name].value = text;
    }
  } catch { /* the defaults, then */ }
}

/** Wires the form; `compose` returns the request that would be sent now. */
export function setUpSettings(compose, announce) {
  restore();
  summarize();
  form.addEventListener("input", () => { summarize(); store(); });
  form.addEventListener("reset", () => setTimeout(() => { summarize(); store(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
  const copy = document.getElementById("copy-curl");
  copy.addEventListener("click", async () => {
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(toCurl(compose()));
    } catch (error) {
      said = `Not copied: ${error.message}`;
    }
    announce(said);
    copy.textContent = said;
    setTimeout(() => { copy.textContent = "Copy as curl"; }, 2500);
  });
}

function toCurl(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${location.origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n`
    + `  -H "Authorization: Bearer $API_KEY" \\\n  -d '${json}'`;
}
