// The rows of the batch over the last minute, the queue and the rate under them, on one time axis.

import { color, hatch, prepare } from "./colors.js";
import { SPAN } from "./history.js";

const GUTTER = 38; // pixels for labels at the left
const DELAY = 0.3; // seconds shown late, so that time moves evenly between two looks
const BANDS = [["waiting", "queue", 30], ["rate", "tok/s", 38]];
const HINT = "One colour a request. Point at or tap a bar to name it.";
const FONT = "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

/** Draws one stretch of a sequence's life; `isStart` marks that it joined the batch here. */
export function drawStretch(context, x, y, width, height, name, isPrefill, isStart) {
  context.fillStyle = color(name);
  if (isPrefill) {
    context.globalAlpha = 0.3;
    context.fillRect(x, y, width, height);
    context.globalAlpha = 1;
    hatch(context, x, y, width, height, color("ink"));
  } else {
    context.fillRect(x, y, width, height);
  }
  if (isStart) {
    context.fillStyle = color("ink");
    context.fillRect(x, y, Math.min(2, Math.max(1, height / 4)), height);
  }
}

export class Timeline {
  constructor(canvas, readout, history, announce) {
    Object.assign(this, { canvas, readout, history, announce, numRows: 32, arrived: 0, pointer: null, cursor: null });
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.isVisible = true;
    this.span = SPAN;
    this.drawn = 0;
    new IntersectionObserver(([entry]) => {
      this.isVisible = entry.isIntersecting;
      if (this.isVisible) this.draw();
    }).observe(canvas);
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    this.#listen();
    requestAnimationFrame((now) => this.#animate(now));
  }

  /** Called after the history took in a look. */
  update(numRows) {
    this.numRows = numRows ?? this.numRows;
    this.arrived = performance.now();
    if (this.calm.matches || this.history.numSegments > 2500) this.draw();
  }

  #animate(now) {
    requestAnimationFrame((next) => this.#animate(next));
    const { last } = this.history;
    if (!last || !this.isVisible || now - this.drawn < 48) return;
    if (this.calm.matches || this.history.numSegments > 2500) return;
    // Without news nothing moves any more.
    if (now - this.arrived < 1000) this.draw();
  }

  /** The time at the right edge. */
  get end() {
    const { last } = this.history;
    if (!last) return 0;
    if (this.calm.matches) return last.time;
    return Math.min(last.time, last.time - DELAY + (performance.now() - this.arrived) / 1000);
  }

  /** Shows so many of the last seconds. */
  setSpan(seconds) {
    this.span = seconds;
    this.draw();
  }

  #measure() {
    const style = getComputedStyle(this.canvas.parentElement);
    const width = this.canvas.parentElement.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const rows = Math.max(1, this.numRows);
    const rowHeight = Math.max(1, Math.min(22, Math.round(288 / rows)));
    const top = 6;
    const bottom = top + rows * rowHeight;
    const height = bottom + BANDS.reduce((sum, band) => sum + band[2] + 10, 0) + 18;
    return { width, plot: width - GUTTER, rows, rowHeight, top, bottom, height };
  }

  draw() {
    this.drawn = performance.now();
    const box = this.#measure();
    if (box.plot <= 0) return;
    this.box = box;
    const context = prepare(this.canvas, box.width, box.height);
    context.font = FONT;
    context.textBaseline = "middle";
    const end = this.end;
    const toX = (time) => GUTTER + box.plot * (1 - (end - time) / this.span);
    this.#drawAxes(context, box);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, box.plot, box.height);
    context.clip();
    for (const line of this.history.rows) for (const sequence of line ?? []) this.#drawSequence(context, box, sequence, toX);
    context.restore();
    let y = box.bottom + 10;
    for (const [name, label, height] of BANDS) {
      this.#drawBand(context, box, name, label, y, height, toX);
      y += height + 10;
    }
    this.#drawPointer(context, box, end, toX);
  }

  #drawAxes(context, box) {
    context.textAlign = "right";
    context.fillStyle = color("muted");
    const every = box.rows <= 8 ? 1 : Math.ceil(box.rows / 4);
    for (let row = 0; row < box.rows; row += every) {
      context.fillText(String(row), GUTTER - 8, box.top + (row + 0.5) * box.rowHeight + (every > 1 ? 1 : 0));
      if (every > 1 && row) this.#rule(context, box, box.top + row * box.rowHeight);
    }
    const foot = box.height - 18;
    context.strokeStyle = color("line");
    context.beginPath();
    const tick = this.span / 6;
    for (let ago = 0; ago <= this.span; ago += tick) {
      const x = Math.round(GUTTER + box.plot * (1 - ago / this.span)) + (ago === 0 ? -0.5 : 0.5);
      context.moveTo(x, box.top);
      context.lineTo(x, foot);
      if (ago % (2 * tick) && box.plot < 420) continue;
      context.textAlign = ago === 0 ? "right" : ago === this.span ? "left" : "center";
      context.fillText(ago === 0 ? "now" : `-${ago} s`, x, foot + 11);
    }
    context.stroke();
    this.#rule(context, box, box.bottom);
  }

  #rule(context, box, y) {
    context.fillStyle = color("line");
    context.fillRect(GUTTER, Math.round(y), box.plot, 1);
    context.fillStyle = color("muted");
  }

  #drawSequence(context, box, sequence, toX) {
    const gap = box.rowHeight >= 4 ? 1 : 0;
    const y = box.top + sequence.row * box.rowHeight + (box.rowHeight >= 14 ? 2 : 0) + gap;
    const height = box.rowHeight - gap - (box.rowHeight >= 14 ? 3 : 0);
    sequence.phases.forEach((phase, at) => {
      const x = toX(phase.start);
      const width = Math.max(1, toX(phase.end) - x);
      if (x + width < GUTTER || x > box.width) return;
      drawStretch(context, x, y, width, height, `r${sequence.color}`, phase.phase === "prefill", at === 0);
    });
  }

  #drawBand(context, box, name, label, y, height, toX) {
    const { series } = this.history;
    const most = Math.max(name === "waiting" ? 4 : 10, ...series.map((entry) => entry[name]));
    context.textAlign = "right";
    context.fillStyle = color("muted");
    context.fillText(label, GUTTER - 6, y + height - 6);
    if (height > 24) context.fillText(shorten(most), GUTTER - 6, y + 5);
    this.#rule(context, box, y + height);
    if (series.length < 2) return;
    const toY = (value) => y + height - (value / most) * (height - 1);
    context.save();
    context.beginPath();
    context.rect(GUTTER, y - 1, box.plot, height + 2);
    context.clip();
    context.beginPath();
    series.forEach((entry, at) => {
      const x = toX(entry.time);
      // A queue's length is a step; a rate is a line.
      if (name === "waiting" && at > 0) context.lineTo(x, toY(series[at - 1].waiting));
      context.lineTo(x, toY(entry[name]));
    });
    context.strokeStyle = color(name === "waiting" ? "r1" : "accent");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(toX(series.at(-1).time), y + height);
    context.lineTo(toX(series[0].time), y + height);
    context.globalAlpha = 0.16;
    context.fillStyle = context.strokeStyle;
    context.fill();
    context.restore();
  }

  #drawPointer(context, box, end, toX) {
    const point = this.cursor
      ? { row: this.cursor.row, time: end - this.cursor.ago }
      : this.pointer && {
        row: Math.floor((this.pointer.y - box.top) / box.rowHeight),
        time: end - this.span * (1 - (this.pointer.x - GUTTER) / box.plot),
      };
    if (!point || point.row < 0 || point.row >= box.rows || this.pointer?.x < GUTTER) return this.#say(null, null);
    const found = this.history.at(point.row, point.time);
    if (this.cursor) {
      context.fillStyle = color("ink");
      const x = Math.min(toX(point.time), box.width - 1);
      context.fillRect(x - 0.5, box.top, 1, box.bottom - box.top);
      context.fillRect(x - 4, box.top + (point.row + 0.5) * box.rowHeight - 1, 8, 2);
    }
    if (found) {
      context.strokeStyle = color("ink");
      context.lineWidth = 1.5;
      const left = Math.max(GUTTER, toX(found.start));
      const height = Math.max(4, box.rowHeight);
      context.strokeRect(left, box.top + found.row * box.rowHeight, Math.max(3, toX(found.end) - left), height);
    }
    return this.#say(point, found);
  }

  #say(point, found) {
    const text = point ? (found ? describe(found, point.time) : `row ${point.row}: free`) : HINT;
    if (this.readout.textContent !== text) this.readout.textContent = text;
    this.readout.classList.toggle("named", Boolean(found));
  }

  #listen() {
    const { canvas } = this;
    const locate = (event) => {
      const frame = canvas.getBoundingClientRect();
      this.cursor = null;
      this.pointer = { x: event.clientX - frame.left, y: event.clientY - frame.top };
      this.draw();
    };
    canvas.addEventListener("pointermove", locate);
    canvas.addEventListener("pointerdown", locate);
    canvas.addEventListener("pointerleave", (event) => {
      // A tap keeps its name; only a mouse that leaves lets go of it.
      if (event.pointerType === "mouse") { this.pointer = null; this.draw(); }
    });
    canvas.addEventListener("blur", () => { this.cursor = null; this.draw(); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, 1], ArrowRight: [0, -1] }[event.key];
      if (!step || !this.box) return;
      event.preventDefault();
      const from = this.cursor ?? { row: -step[0], ago: 0 };
      this.cursor = {
        row: Math.min(this.box.rows - 1, Math.max(0, from.row + step[0])),
        ago: Math.min(this.span, Math.max(0, from.ago + step[1] * (this.span / 60))),
      };
      this.draw();
      this.announce(this.readout.textContent);
    });
  }
}

const shorten = (number) => (number >= 1000 ? `${(number / 1000).toFixed(number < 10000 ? 1 : 0)}k` : String(Math.ceil(number)));

function describe(sequence, time) {
  const phase = sequence.phases.findLast((each) => each.start <= time) ?? sequence.phases[0];
  const made = Math.max(0, sequence.tokens - sequence.prompt);
  const parts = [
    `row ${sequence.row}`, sequence.id, phase.phase, `${sequence.prompt} prompt + ${made} new tokens`,
    `${(sequence.end - sequence.start).toFixed(1)} s`,
  ];
  if (sequence.tenant) parts.push(`tenant ${sequence.tenant}`);
  if (sequence.tier && sequence.tier !== "default") parts.push(`tier ${sequence.tier}`);
  if (sequence.priority) parts.push(`priority ${sequence.priority}`);
  return parts.join(" \u00b7 ");
}
