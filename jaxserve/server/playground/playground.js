// Puts the page together: theme, key, the server's state, and the keys that work everywhere.

import { ApiError, ask, readKey, sleep, storeKey } from "./api.js";
import { compose, isAnswering, retryAfter, setModel, setUpChat, stopAnswer } from "./chat.js";
import { EngineView } from "./engine.js";
import { isLoading, setUpLoad, stopLoad } from "./load.js";
import { setUpSettings } from "./settings.js";

const find = (id) => document.getElementById(id);
const THEMES = ["system", "light", "dark"];
let models = []; // names: the base model's first, then adapters
let context = null; // tokens
let isLive = false;
let keyChanged = () => {};

function announce(text) {
  find("announce").textContent = text;
}

// Theme

function readTheme() {
  return document.documentElement.dataset.theme ?? "system";
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    if (theme === "system") localStorage.removeItem("jaxserve.theme");
    else localStorage.setItem("jaxserve.theme", theme);
  } catch { /* for this visit only, then */ }
  find("theme-name").textContent = theme;
  find("theme").setAttribute("aria-label", `Theme: ${theme}`);
}

function setUpTheme(view) {
  setTheme(readTheme());
  find("theme").addEventListener("click", () => {
    setTheme(THEMES[(THEMES.indexOf(readTheme()) + 1) % THEMES.length]);
    view.redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.redraw());
}

// Key

function openKey(isOpen) {
  find("key-form").hidden = !isOpen;
  find("key-open").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) find("key").value = readKey();
}

function wantKey(wasWrong) {
  const form = find("key-form");
  form.classList.add("asked");
  find("key-why").textContent = (wasWrong ? "The server does not know this key. Please try another one. "
    : "This server answers to those who have a key. Please enter yours. ")
    + "It is kept in this tab only and is sent to this server and nowhere else.";
  openKey(true);
  find("key").select();
  form.scrollIntoView({ block: "nearest" });
}

function setUpKey() {
  find("key-open").addEventListener("click", () => {
    openKey(find("key-form").hidden);
    if (!find("key-form").hidden) find("key").focus();
  });
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    changeKey(find("key").value.trim());
    find("prompt").focus();
  });
  find("key-forget").addEventListener("click", () => changeKey(""));
  document.addEventListener("key-wanted", (event) => wantKey(event.detail));
}

function changeKey(key) {
  storeKey(key);
  openKey(false);
  find("key-form").classList.remove("asked");
  announce(key ? "The key is set." : "The key is forgotten.");
  keyChanged();
  if (key) retryAfter(401);
}

// The server's state

const TEXTS = { lost: "no connection", failed: "failed", stuck: "device is stuck" };

function showState(state, note = "") {
  find("state").dataset.state = state;
  const text = (TEXTS[state] ?? state) + note;
  if (find("state-text").textContent !== text) find("state-text").textContent = text;
}

async function readHealth() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    const health = await response.json();
    return { ...health, isReady: response.ok };
  } catch {
    return { status: "lost", isReady: false };
  }
}

function showHealth({ status, progress, isReady }) {
  showState(isReady ? "ready" : status);
  const isStarting = status === "starting" || status === "warming";
  find("start").hidden = !isStarting;
  if (!isStarting) return;
  const { title, done, total, note } = progress ?? {};
  find("start-title").textContent = title || "The server is starting";
  find("start-note").textContent = [total ? `${done} of ${total}` : "", note].filter(Boolean).join(", ");
  const bar = find("start-progress");
  if (total) Object.assign(bar, { max: total, value: done });
  else bar.removeAttribute("value");
}

async function loadModels() {
  const { data } = await (await ask("v1/models")).json();
  models = data.map((card) => card.id);
  context = data[0].max_model_len ?? null;
  find("models").replaceChildren(...models.map((name) => new Option(name)));
  find("models").hidden = models.length === 1;
  find("model").hidden = models.length > 1;
  find("model").textContent = models[0];
  setModel(models[0]);
  if (context) find("model-length").textContent = `${context.toLocaleString("en")} tokens of context`;
}

async function pollHealth() {
  for (;;) {
    if (!isLive) showHealth(await readHealth());
    await sleep(1000);
  }
}

/** Keeps the live view going: again and again, at growing distances while nothing comes. */
async function keepLive(view) {
  for (let wait = 500; ; wait = Math.min(8000, wait * 2)) {
    try {
      const health = await readHealth();
      if (health.isReady || health.status === "draining") {
        if (!models.length) await loadModels();
        await view.watch((look) => {
          wait = 500;
          // While the server is not ready its health says more than its looks.
          isLive = look.state === "ready";
          if (isLive) { find("start").hidden = true; showState("ready"); }
        });
      } else {
        wait = 500;
      }
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) await new Promise((done) => { keyChanged = done; });
    }
    isLive = false;
    await sleep(wait);
  }
}

// Everything

function setUpModels() {
  find("models").addEventListener("change", (event) => {
    setModel(event.target.value);
    announce(`${event.target.value} answers from now on.`);
  });
}

function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (isAnswering()) stopAnswer();
    else if (!find("key-form").hidden) { openKey(false); find("key-open").focus(); }
    else if (isLoading()) stopLoad();
  });
}

const view = new EngineView(announce);
setUpTheme(view);
setUpKey();
setUpChat(announce);
setUpSettings(() => compose(find("prompt").value || "Hello"), announce);
setUpLoad(() => ({ models, context }));
setUpModels();
setUpKeys();
pollHealth();
keepLive(view);
