// What the looks at the engine of the last minute amount to: who sat in which row, and the series.

export const SPAN = 60; // seconds
export const NUM_COLORS = 8;
const GAP = 1.5; // seconds without a look after which nothing is known to have gone on

export class History {
  constructor() { this.reset(); }

  reset() {
    this.rows = []; // of each row, its sequences: {id, color, row, start, end, phases: [{phase, start, end}], ...}
    this.series = []; // {time, running, waiting, counters, rate}
    this.colors = new Map(); // of requests, so that a preempted one comes back in its own
    this.nextColor = 0;
  }

  get last() { return this.series.at(-1); }

  /** Takes in one look. */
  add(look) {
    const counters = look.counters ?? {};
    // A clock or a counter that went back is another engine's.
    const old = this.last;
    if (old && (look.time < old.time || counters.steps < old.counters.steps)) this.reset();
    const before = this.last && look.time - this.last.time < GAP ? this.last.time : look.time - 0.25;
    const running = look.rows?.running ?? [];
    const numbers = new Map(); // how many rows one id has: sequences of one request share it
    for (const { id } of running) numbers.set(id, (numbers.get(id) ?? 0) + 1);
    for (const item of running) this.#seat(item, look.time, before, numbers.get(item.id) > 1);
    const entry = { time: look.time, running: running.length, waiting: look.rows?.waiting ?? 0, counters, rate: 0 };
    this.series.push(entry);
    entry.rate = this.rate("generation_tokens", 1);
    this.#forget(look.time - SPAN - 2);
  }

  #seat(item, time, before, isOneOfMany) {
    const line = (this.rows[item.row] ??= []);
    let sequence = line.at(-1);
    const goesOn = sequence && sequence.end === before && sequence.id === item.id
      && sequence.prompt === item.prompt && item.tokens >= sequence.tokens;
    if (!goesOn) {
      const color = this.#color(isOneOfMany ? `${item.id} ${item.row}` : item.id, item.row);
      sequence = { id: item.id, row: item.row, color, prompt: item.prompt, start: before, phases: [] };
      line.push(sequence);
    }
    const { tokens, computed, priority, service_tier: tier, tenant } = item;
    Object.assign(sequence, { end: time, tokens, computed, priority, tier, tenant });
    const phase = sequence.phases.at(-1);
    if (phase?.phase === item.phase) phase.end = time;
    else sequence.phases.push({ phase: item.phase, start: before, end: time });
  }

  /** The request's colour, or the next one that no neighbour has. */
  #color(name, row) {
    let color = this.colors.get(name);
    if (color === undefined) {
      const near = [row - 1, row, row + 1].map((at) => this.rows[at]?.at(-1)?.color);
      for (let tries = 0; tries < NUM_COLORS; tries++) {
        color = this.nextColor++ % NUM_COLORS;
        if (!near.includes(color)) break;
      }
    }
    this.colors.delete(name);
    this.colors.set(name, color);
    if (this.colors.size > 4096) this.colors.delete(this.colors.keys().next().value);
    return color;
  }

  #forget(oldest) {
    const kept = this.series.findIndex((entry) => entry.time >= oldest);
    if (kept > 0) this.series.splice(0, kept);
    for (const line of this.rows) {
      let gone = 0;
      while (line && gone < line.length && line[gone].end < oldest) gone++;
      if (gone) line.splice(0, gone);
    }
  }

  /** How much a counter rose within the last seconds. */
  rise(name, seconds) {
    const { last } = this;
    const first = this.series.find((entry) => entry.time >= last?.time - seconds);
    return last ? (last.counters[name] ?? 0) - (first.counters[name] ?? 0) : 0;
  }

  /** A counter's rise in a second, over the last seconds. */
  rate(name, seconds) {
    const { last } = this;
    const first = this.series.find((entry) => entry.time >= last?.time - seconds - 0.01);
    const elapsed = last ? last.time - first.time : 0;
    return elapsed > 0 ? ((last.counters[name] ?? 0) - (first.counters[name] ?? 0)) / elapsed : 0;
  }

  get numSegments() {
    return this.rows.reduce((sum, line) => sum + (line?.length ?? 0), 0);
  }

  /** Who sat in a row at a time. */
  at(row, time) {
    return this.rows[row]?.findLast((sequence) => sequence.start <= time && time <= sequence.end + 0.1) ?? null;
  }
}
