// A conversation as data: its settings and its turns, as they are kept, shown and sent.
//
// A turn is { role: "user", content }, { role: "tool", content, callId, name }, or an answer: { role: "assistant",
// content, reasoning, calls: [{ id, name, arguments }], note: [words], error }.

const TITLE_LENGTH = 60;
export const SETTINGS = ["system", "tools", "thinking", "temperature", "maxTokens", "floor"]; // all as they are typed
const OWN = ["system", "tools"]; // that a new conversation does not begin with
const ROLES = ["user", "assistant", "tool"];

/** A new conversation, which samples like the one before. */
export function fresh(before = {}) {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, OWN.includes(name) ? "" : before[name] ?? ""]));
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, at: Date.now(), settings, turns: [] };
}

export const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", calls: [], note: [], error: "" });

export function titleOf({ turns }) {
  const text = turns.find(({ role }) => role === "user")?.content.trim().split("\n")[0] ?? "";
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}…` : text || "New chat";
}

/** Adds what a stream's delta brings to an answer. Calls come whole, or in fragments that belong together by index. */
export function take(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const { index, id, function: given = {} } of delta.tool_calls ?? []) {
    const call = (answer.calls[index ?? answer.calls.length] ??= { id: `call_${index}`, name: "", arguments: "" });
    call.id = id || call.id;
    call.name += given.name ?? "";
    call.arguments += given.arguments ?? "";
  }
}

/** The calls of an answer that can be run; one that was cut off within its arguments cannot. */
export const wholeCalls = ({ calls }) => calls.filter((call) => call?.name && argumentsOf(call) !== undefined);

/** The calls whose results the conversation waits for. */
export function waitingCalls({ turns }) {
  const last = turns.at(-1);
  return last?.role === "assistant" ? wholeCalls(last) : [];
}

/** The arguments of a call as an object; undefined where they are none. */
export function argumentsOf(call) {
  const found = parse(call.arguments || "{}");
  return found && typeof found === "object" && !Array.isArray(found) ? found : undefined;
}

/** JSON for people to read, any other text as it is. */
export function pretty(text) {
  const found = parse(text);
  return found && typeof found === "object" ? JSON.stringify(found, null, 2) : text;
}

/** The value of a JSON text; undefined where it is none. */
export function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** A conversation of what was kept, with every field of its kind; null for anything else. */
export function sound(value) {
  if (typeof value?.id !== "string" || typeof value.at !== "number" || !Array.isArray(value.turns)) return null;
  const given = value.settings ?? {};
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, text(given[name])]));
  const turns = value.turns.filter((turn) => ROLES.includes(turn?.role)).map(soundTurn);
  return { id: value.id, at: value.at, settings, turns };
}

function soundTurn(turn) {
  const { role, content } = turn;
  if (role === "user") return { role, content: text(content) };
  if (role === "tool") return { role, content: text(content), callId: text(turn.callId), name: text(turn.name) };
  const calls = list(turn.calls).filter(Boolean).map((call) => {
    return { id: text(call.id), name: text(call.name), arguments: text(call.arguments) };
  });
  const note = list(turn.note).map(text);
  return { role, content: text(content), reasoning: text(turn.reasoning), calls, note, error: text(turn.error) };
}

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
