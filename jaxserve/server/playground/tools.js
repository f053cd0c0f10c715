// Two tools that a chat can offer: they run here, in the page, and their results go back to the model.

const define = (name, description, properties) => ({
  type: "function",
  function: { name, description, parameters: { type: "object", properties, required: Object.keys(properties) } },
});

export const TOOLS = [
  define("add", "Adds two numbers.", { a: { type: "integer" }, b: { type: "integer" } }),
  define("lookup", "Looks up a term in the glossary.", { term: { type: "string" } }),
];

const GLOSSARY = new Map([
  ["token", "A token is a piece of text, often a word or a part of one."],
  ["page", "A page holds the keys and values of a few tokens in a row."],
  ["batch", "A batch is a group of sequences that share each step."],
  ["row", "A row is the place of one sequence in the batch."],
]);

const RUN = {
  add({ a, b }) {
    if (typeof a !== "number" || typeof b !== "number") throw new Error("a and b must be numbers");
    return String(a + b);
  },
  lookup({ term }) {
    const key = String(term).toLowerCase().replace(/^(a|an|the) /, "");
    const found = GLOSSARY.get(key) ?? GLOSSARY.get(key.replace(/s$/, ""));
    if (found === undefined) throw new Error(`no entry for ${term}`);
    return found;
  },
};

/** Returns a call's result, as the model gets it; a fault becomes a result, too. */
export function runCall({ name, text }) {
  try {
    if (!Object.hasOwn(RUN, name)) throw new Error(`there is no tool ${name}`);
    return RUN[name](JSON.parse(text));
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** Adds the pieces of a chunk to the calls of an answer; returns those that are new. */
export function gatherCalls(calls, pieces) {
  const begun = [];
  for (const { index, id, function: piece } of pieces) {
    if (!calls[index]) begun.push(calls[index] = { id, name: piece.name, text: "" });
    calls[index].text += piece.arguments ?? "";
  }
  return begun;
}

/** An answer's calls and their results, as messages of a request. */
export function writeCalls(content, calls) {
  const written = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return [
    { role: "assistant", content, tool_calls: written },
    ...calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result })),
  ];
}
