// The style sheet's colours, for canvases, and what canvases have in common.

const cache = new Map();
const probe = document.createElement("span");

/** Returns a custom property as the theme of now has it. */
export function color(name) {
  if (!cache.has(name)) {
    probe.style.cssText = `display:none;color:var(--${name})`;
    document.body.append(probe);
    cache.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return cache.get(name);
}

export const forgetColors = () => cache.clear();

/** Sizes a canvas for its box and the screen; returns a cleared context in CSS pixels. */
export function prepare(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Fills a box with slanted lines, which say the same without colour. */
export function hatch(context, x, y, width, height, style) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = style;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 4) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
