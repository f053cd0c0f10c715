// The live view of the engine: reads the looks that the server streams, and shows what they amount to.

import { ask, readEvents } from "./api.js";
import { forgetColors, prepare } from "./colors.js";
import { History, SPAN } from "./history.js";
import { drawPage, PageMap } from "./pages.js";
import { drawStretch, Timeline } from "./timeline.js";

const find = (id) => document.getElementById(id);
const format = (number) => Math.round(number).toLocaleString("en");
const shorten = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format;
const MOST_TENANTS = 6; // that are shown by name
const percent = (share) => (share > 0 && share < 0.01 ? "<1" : String(Math.round(share * 100)));

export class EngineView {
  constructor(announce) {
    this.history = new History();
    this.timeline = new Timeline(find("timeline"), find("readout"), this.history, announce);
    this.pages = new PageMap(find("pages"));
    this.numLooks = 0;
    this.drawSwatches();
    find("span").addEventListener("change", (event) => this.timeline.setSpan(Number(event.target.value)));
  }

  /** Shows the engine until the stream ends; `onLook` is told of each look. Throws what `ask` throws. */
  async watch(onLook) {
    for await (const look of readEvents(await ask("live"))) {
      this.show(look);
      onLook(look);
    }
  }

  show(look) {
    if (typeof look.time !== "number") return;
    if (look.rows) find("engine").classList.remove("blind");
    this.history.add(look);
    this.timeline.update(look.rows?.max);
    if (look.rows) this.#showRows(look);
    if (look.pages) this.#showPages(look.pages);
    // Numbers that change four times a second cannot be read.
    if (this.numLooks++ % 2 === 0) this.#showNumbers(look);
  }

  /** Draws everything again in the colours of the theme. */
  redraw() {
    forgetColors();
    this.drawSwatches();
    this.timeline.draw();
    this.pages.draw();
  }

  drawSwatches() {
    for (const canvas of document.querySelectorAll("canvas[data-swatch]")) {
      const kind = canvas.dataset.swatch;
      const context = prepare(canvas, 18, 11);
      if (kind === "join") drawStretch(context, 4, 0, 14, 11, "r0", false, true);
      else if (kind === "prefill") drawStretch(context, 0, 0, 18, 11, "r0", true, false);
      else if (kind === "decode") drawStretch(context, 0, 0, 18, 11, "r0", false, false);
      else drawPage(context, 4, 0, 11, kind);
    }
  }

  #showRows({ rows, step }) {
    find("running").textContent = rows.running.length;
    find("row-max").textContent = rows.max;
    find("waiting").textContent = rows.waiting;
    find("step").textContent = step?.bucket ? `, last step ${step.bucket}` : "";
    find("sharing").textContent = describeSharing(rows);
    if (this.numLooks % 20 === 0) {
      find("timeline").setAttribute("aria-label", `Rows of the batch over the last minute: ${rows.running.length} of `
        + `${rows.max} running now, ${rows.waiting} requests waiting`);
    }
  }

  #showPages(pages) {
    const { map, total, used, cached } = pages;
    const bin = map.length ? Math.ceil(total / map.length) : 1;
    find("pages-used").textContent = format(used);
    find("pages-total").textContent = format(total);
    find("pages-note").textContent = (pages.page_size ? `, ${pages.page_size} tokens each` : "") + (bin > 1 ? `; one cell is ${bin} pages` : "");
    let shared = 0;
    for (const state of map) if (state === "3") shared += bin;
    [total - used - cached, cached, used - shared, shared].forEach((number, state) => {
      // Cells of several pages show their fullest page, so what is shared is not known by number.
      const isKnown = bin === 1 || state < 2;
      find(`pages-${state}`).textContent = isKnown ? format(Math.max(0, number)) : "";
    });
    this.pages.update(map);
    if (this.numLooks % 20 === 0) {
      find("pages").setAttribute("aria-label", `State of every KV page: ${used} of ${total} used, ${cached} cached`);
    }
  }

  #showNumbers({ counters, latency }) {
    if (counters) {
      find("rate").textContent = format(this.history.rate("generation_tokens", 2));
      const [drafts, accepted] = ["drafts", "accepted_tokens"].map((name) => this.#recent(counters, name));
      const length = drafts ? `, accepted length ${(1 + accepted / drafts).toFixed(1)}` : "";
      find("rate-note").textContent = `prompts ${format(this.history.rate("prompt_tokens", 2))}/s${length}`;
      const [useful, padded] = ["useful_tokens", "padded_tokens"].map((name) => this.#recent(counters, name));
      this.#showShare("padding", padded, useful + padded);
      const [hits, queries] = ["prefix_hits", "prefix_queries"].map((name) => this.#recent(counters, name));
      this.#showShare("prefix", hits, queries);
      if (useful + padded) find("padding-note").textContent = `of ${shorten(useful + padded)} positions`;
      if (queries) find("prefix-note").textContent = `of ${shorten(queries)} tokens`;
    }
    for (const name of ["ttft", "itl"]) {
      const { p50 = null, p99 = null } = latency?.[`${name}_ms`] ?? {};
      showTime(find(name), p50);
      find(`${name}-note`).textContent = p99 === null ? "p99 \u2013" : `p99 ${round(p99)} ms`;
    }
  }

  /** How much a counter rose in the last minute; all of it when nothing happened there. */
  #recent(counters, name) {
    return this.history.rise("steps", SPAN) > 0 ? this.history.rise(name, SPAN) : counters[name] ?? 0;
  }

  #showShare(id, part, whole) {
    const box = find(id);
    if (whole > 0) withUnit(box, percent(part / whole), "%");
    else box.textContent = "\u2013";
    find(`${id}-meter`).style.width = whole > 0 ? `${(100 * part) / whole}%` : "0";
  }
}

/** How many rows each tier and each tenant has, and how many sequences of it wait; empty where nobody uses either. */
function describeSharing({ running, waiting_by_tenant: waiting = {} }) {
  const tiers = new Map(["priority", "default", "flex"].map((tier) => [tier, 0]));
  const tenants = new Map(Object.keys(waiting).map((name) => [name, 0]));
  for (const { service_tier: tier, tenant } of running) {
    if (tier) tiers.set(tier, (tiers.get(tier) ?? 0) + 1);
    if (tenant) tenants.set(tenant, (tenants.get(tenant) ?? 0) + 1);
  }
  const used = [...tiers].filter(([, count]) => count > 0);
  const parts = used.some(([tier]) => tier !== "default") ? [used.map(([tier, count]) => `${tier} ${count}`).join(", ")] : [];
  const names = [...tenants.keys()].sort();
  const describe = (name) => `${name} ${tenants.get(name)}` + (waiting[name] ? ` (+${waiting[name]} waiting)` : "");
  const shown = names.slice(0, MOST_TENANTS).map(describe);
  if (names.length > MOST_TENANTS) shown.push(`${names.length - MOST_TENANTS} more`);
  if (shown.length) parts.push(shown.join(", "));
  return parts.join(" \u00b7 ");
}

const round = (number) => (number < 10 ? number.toFixed(1) : format(number));

function showTime(box, milliseconds) {
  if (milliseconds === null) box.textContent = "\u2013";
  else withUnit(box, round(milliseconds), "ms");
}

function withUnit(box, text, unit) {
  const small = document.createElement("i");
  small.textContent = unit;
  box.replaceChildren(text, small);
}
