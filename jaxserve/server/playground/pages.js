// The map of KV pages: one cell for each page, or for a few of them when there are many.

import { color, prepare } from "./colors.js";

const MOST_HEIGHT = 172;

/** Draws one cell. States differ in shape and in lightness, not in hue alone. */
export function drawPage(context, x, y, size, state) {
  if (state === "0") {
    context.strokeStyle = color("page-free");
    context.lineWidth = 1;
    if (size >= 8) context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    else { context.fillStyle = color("line"); context.fillRect(x, y, size, size); }
    return;
  }
  context.fillStyle = color(["", "page-cached", "page-used", "page-shared"][state]);
  context.fillRect(x, y, size, size);
  if (size < 6) return;
  const third = Math.max(2, Math.round(size / 3));
  const at = Math.floor((size - third) / 2);
  context.fillStyle = color("surface");
  if (state === "3") context.fillRect(x + at, y + at, third, third);
  if (state === "1") {
    context.beginPath();
    context.moveTo(x + size, y + size);
    context.lineTo(x + size, y + size * 0.35);
    context.lineTo(x + size * 0.35, y + size);
    context.fill();
  }
}

/** Returns the largest cell with which all cells fit. */
function layOut(number, width) {
  for (let size = 14; size > 2; size--) {
    const gap = size >= 7 ? 2 : 1;
    const columns = Math.max(1, Math.floor((width + gap) / (size + gap)));
    const lines = Math.ceil(number / columns);
    if (lines * (size + gap) - gap <= MOST_HEIGHT || size === 3) return { size, gap, columns, lines };
  }
  return null;
}

export class PageMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.map = "";
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  update(map) {
    if (map === this.map) return;
    this.map = map;
    this.draw();
  }

  draw() {
    const style = getComputedStyle(this.canvas.parentElement);
    const width = this.canvas.parentElement.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const place = layOut(this.map.length, width);
    if (width <= 0 || !place || !this.map) return;
    const step = place.size + place.gap;
    const context = prepare(this.canvas, width, place.lines * step - place.gap);
    for (let at = 0; at < this.map.length; at++) {
      drawPage(context, (at % place.columns) * step, Math.floor(at / place.columns) * step, place.size, this.map[at]);
    }
  }
}
