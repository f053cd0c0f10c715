// The Markdown that models write: fenced code, headings, lists, inline code, bold and italics. What is not known stays as
// it was written. Everything becomes text nodes in elements that are made here: nothing of a model is ever markup.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^ {0,3}([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*/g;

/** Returns the blocks of a text: {kind: "code" | "heading" | "list" | "paragraph", ...}. */
export function parseBlocks(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; at++) {
    const last = blocks.at(-1);
    const fence = FENCE.exec(lines[at]);
    const heading = HEADING.exec(lines[at]);
    const item = ITEM.exec(lines[at]);
    if (fence) {
      const code = [];
      const closes = (line) => line.trim().startsWith(fence[1]) && !line.trim().slice(fence[1].length).replaceAll(fence[1][0], "");
      while (++at < lines.length && !closes(lines[at])) code.push(lines[at]);
      blocks.push({ kind: "code", language: fence[2].trim(), text: code.join("\n") });
    } else if (heading) {
      blocks.push({ kind: "heading", level: heading[1].length, text: heading[2] });
    } else if (item) {
      const isOrdered = /\d/.test(item[1][0]);
      if (last?.kind === "list" && last.isOrdered === isOrdered) last.items.push(item[2]);
      else blocks.push({ kind: "list", isOrdered, start: isOrdered ? parseInt(item[1], 10) : 1, items: [item[2]] });
    } else if (!lines[at].trim()) {
      if (last?.kind === "paragraph") last.isClosed = true;
    } else if (last?.kind === "list" && /^\s+\S/.test(lines[at])) {
      last.items[last.items.length - 1] += `\n${lines[at].trim()}`;
    } else if (last?.kind === "paragraph" && !last.isClosed) {
      last.text += `\n${lines[at]}`;
    } else {
      blocks.push({ kind: "paragraph", text: lines[at] });
    }
  }
  return blocks;
}

/** Returns the spans of a line: texts, and [tag, spans or text] for what stands out. */
export function parseSpans(text) {
  const spans = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) spans.push(text.slice(end, match.index));
    if (match[1]) spans.push(["code", [match[2]]]);
    else if (match[3]) spans.push(["strong", parseSpans(match[3])]);
    else spans.push(["em", parseSpans(match[4])]);
    end = match.index + match[0].length;
  }
  if (end < text.length) spans.push(text.slice(end));
  return spans;
}

/** Returns elements that show a text. */
export function showMarkdown(text) {
  return parseBlocks(text).map((block) => {
    if (block.kind === "code") return element("pre", [element("code", [block.text])]);
    if (block.kind === "heading") return element(`h${Math.min(6, block.level + 2)}`, block.text);
    if (block.kind === "paragraph") return element("p", block.text);
    const list = element(block.isOrdered ? "ol" : "ul", block.items.map((item) => ["li", parseSpans(item)]));
    if (block.isOrdered) list.start = block.start;
    return list;
  });
}

function element(tag, content) {
  const made = document.createElement(tag);
  const parts = typeof content === "string" ? parseSpans(content) : content;
  made.append(...parts.map((part) => (Array.isArray(part) ? element(...part) : part)));
  return made;
}
