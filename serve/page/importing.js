// A conversation out of an exported file: the body of a request, in any dialect.

import { newAnswer, parse } from "./conversation.js";

const NONE = "This file is no conversation: it has neither the messages of a request nor its input.";

/** The settings and turns of a conversation in `text`, for the model of `card`. Throws what is wrong, in words. */
export function readConversation(text, card) {
  const body = parse(text);
  if (body === undefined) throw new Error("This file is no JSON.");
  const items = body?.input ?? body?.messages;
  if (!Array.isArray(items) && typeof items !== "string") throw new Error(NONE);
  const found = { system: [textOf(body.instructions ?? body.system ?? "")], turns: [] };
  for (const item of typeof items === "string" ? [{ role: "user", content: items }] : items) addItem(found, item);
  if (!found.turns.length) throw new Error("This file has no turns of a conversation.");
  return { settings: settingsOf(body, found.system.filter(Boolean).join("\n\n"), card), turns: found.turns };
}

function settingsOf(body, system, card) {
  const most = body.max_tokens ?? body.max_completion_tokens ?? body.max_output_tokens;
  return {
    system,
    tools: Array.isArray(body.tools) && body.tools.length ? JSON.stringify(body.tools, null, 2) : "",
    thinking: thinkingOf(body),
    temperature: typed(body.temperature),
    maxTokens: most < (card.max_model_len ?? Infinity) ? typed(most) : "", // Messages want one where there is no limit
    floor: typeof body.kv_floor === "string" ? body.kv_floor : "",
  };
}

function thinkingOf({ chat_template_kwargs: template, thinking, reasoning }) {
  const isOn = template?.enable_thinking ?? (thinking?.type ? thinking.type !== "disabled" : undefined);
  if (isOn === undefined) return reasoning?.effort === "none" ? "off" : "";
  return isOn ? "on" : "off";
}

/** Adds a message of any dialect, or an item of Responses. */
function addItem(found, item) {
  switch (item?.type ?? "message") {
    case "reasoning":
      answerOf(found).reasoning += textOf(item.content?.length ? item.content : item.summary);
      return;
    case "function_call":
      addCall(found, item.call_id, item.name, item.arguments);
      return;
    case "function_call_output":
      addResult(found, item.call_id, item.output);
      return;
    case "message":
      addMessage(found, item ?? {});
      return;
    default:
      throw new Error(`The page cannot show what this file has: an item of type ${item.type}.`);
  }
}

function addMessage(found, { role, content, reasoning_content: thoughts, tool_calls: calls, tool_call_id: id }) {
  if (role === "system" || role === "developer") found.system.push(textOf(content));
  else if (role === "tool") addResult(found, id, content);
  else if (role === "user") addQuestion(found, content);
  else if (role === "assistant") {
    const answer = answerOf(found);
    answer.reasoning += textOf(thoughts);
    for (const part of partsOf(content)) addPart(found, answer, part);
    for (const call of calls ?? []) addCall(found, call?.id, call?.function?.name, call?.function?.arguments);
  } else throw new Error(`A message of this file has the role ${JSON.stringify(role)}, which no dialect has.`);
}

/** A message of a user; Messages put results of calls there, too. */
function addQuestion(found, content) {
  const parts = partsOf(content);
  const isResult = ({ type }) => type === "tool_result";
  for (const part of parts.filter(isResult)) addResult(found, part.tool_use_id, part.content);
  const text = textOf(parts.filter((part) => !isResult(part)));
  if (text || !parts.some(isResult)) found.turns.push({ role: "user", content: text });
}

function addPart(found, answer, part) {
  if (part.type === "thinking") answer.reasoning += part.thinking ?? "";
  else if (part.type === "tool_use") addCall(found, part.id, part.name, JSON.stringify(part.input ?? {}));
  else answer.content += textOf([part]);
}

function addCall(found, id, name, given) {
  if (typeof name !== "string" || !name) throw new Error("A call of this file names no function.");
  answerOf(found).calls.push({ id: id ?? `call_${name}`, name, arguments: given || "{}" });
}

function addResult(found, callId, content) {
  const calls = found.turns.flatMap((turn) => turn.calls ?? []);
  const call = calls.find(({ id }) => id === callId);
  if (!call) throw new Error("This file has the result of a call that it does not have.");
  found.turns.push({ role: "tool", content: textOf(content), callId, name: call.name });
}

/** The answer that the last items belong to: a new one behind a question or a result. */
function answerOf({ turns }) {
  if (turns.at(-1)?.role !== "assistant") turns.push(newAnswer());
  return turns.at(-1);
}

const partsOf = (content) => (Array.isArray(content) ? content : [{ type: "text", text: content ?? "" }]);

/** Text, or parts that are all text. */
function textOf(content) {
  return partsOf(content).map((part) => {
    if (typeof part?.text === "string") return part.text;
    const kind = part?.type && part.type !== "text" ? `of type ${part.type}` : "without text";
    throw new Error(`The page cannot show what this file has: a part ${kind}.`);
  }).join("");
}

const typed = (value) => (typeof value === "number" ? String(value) : "");
