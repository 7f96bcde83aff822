// A conversation as the body of a request, in each dialect. `model` is its card of /v1/models.

import { argumentsOf, wholeCalls } from "./conversation.js";
import { readTools } from "./tools.js";

export const DIALECTS = {
  chat: { path: "v1/chat/completions", body: chatBody },
  responses: { path: "v1/responses", body: responsesBody },
  messages: { path: "v1/messages", body: messagesBody },
};

/** The turns up to the last that wants an answer. */
export const untilQuestion = (turns) => turns.slice(0, turns.findLastIndex(({ role }) => role !== "assistant") + 1);

/** For /v1/chat/completions. Throws words where the settings' tools cannot be read. */
export function chatBody({ turns, settings }, model) {
  const { system, thinking, tools, shared, maxTokens } = options(settings, model);
  const messages = clean(turns).map(chatMessage);
  if (system) messages.unshift({ role: "system", content: system });
  return plain({
    ...shared,
    max_tokens: maxTokens,
    chat_template_kwargs: thinking === undefined ? undefined : { enable_thinking: thinking },
    tools: tools && tools.map((tool) => ({ type: "function", function: tool })),
    messages,
  });
}

/** For /v1/responses. */
export function responsesBody({ turns, settings }, model) {
  const { system, thinking, tools, shared, maxTokens } = options(settings, model);
  return plain({
    ...shared,
    max_output_tokens: maxTokens,
    reasoning: thinking === false ? { effort: "none" } : undefined,
    chat_template_kwargs: thinking ? { enable_thinking: true } : undefined,
    instructions: system || undefined,
    tools: tools && tools.map((tool) => ({ type: "function", ...tool })),
    input: clean(turns).flatMap(responseItems),
  });
}

/** For /v1/messages, which wants a longest answer: the context, where none is set. */
export function messagesBody({ turns, settings }, model) {
  const { system, thinking, tools, shared, maxTokens } = options(settings, model);
  return plain({
    ...shared,
    max_tokens: maxTokens ?? model.max_model_len ?? 4096,
    thinking: thinking === undefined ? undefined : { type: thinking ? "adaptive" : "disabled" },
    system: system || undefined,
    tools: tools && tools.map(({ parameters, ...tool }) => ({ ...tool, input_schema: parameters })),
    messages: clean(turns).reduce(addMessage, []),
  });
}

function options(settings, model) {
  const number = (text) => (text === "" ? undefined : Number(text));
  const tools = model.tools ? readTools(settings.tools) : [];
  return {
    system: settings.system.trim(),
    thinking: model.thinking_switch && settings.thinking ? settings.thinking === "on" : undefined,
    tools: tools.length ? tools : undefined,
    maxTokens: number(settings.maxTokens),
    shared: { model: model.id, temperature: number(settings.temperature), kv_floor: settings.floor || undefined },
  };
}

/** Turns as models expect them: no answers that are empty, and questions that were never answered as one. */
function clean(turns) {
  const found = [];
  for (const turn of turns) {
    const isEmpty = turn.role === "assistant" && !turn.content && !wholeCalls(turn).length;
    if (isEmpty) continue;
    const last = found.at(-1);
    if (turn.role === "user" && last?.role === "user") found[found.length - 1] = join(last, turn);
    else found.push(turn);
  }
  return found;
}

const join = (first, second) => ({ role: "user", content: `${first.content}\n\n${second.content}` });

function chatMessage(turn) {
  const { role, content, reasoning, callId } = turn;
  if (role === "user") return { role, content };
  if (role === "tool") return { role, tool_call_id: callId, content };
  const calls = wholeCalls(turn).map(({ id, name, arguments: given }) => {
    return { id, type: "function", function: { name, arguments: given || "{}" } };
  });
  const spoken = { role, content: content || null, reasoning_content: reasoning || undefined };
  return plain({ ...spoken, tool_calls: calls.length ? calls : undefined });
}

function responseItems(turn, number) {
  const { role, content, reasoning, callId } = turn;
  if (role === "user") return { role, content };
  if (role === "tool") return { type: "function_call_output", call_id: callId, output: content };
  const items = [];
  if (reasoning) {
    const thought = { type: "reasoning_text", text: reasoning };
    items.push({ type: "reasoning", id: `rs_${number}`, summary: [], content: [thought] });
  }
  if (content) items.push({ role, content });
  for (const { id, name, arguments: given } of wholeCalls(turn)) {
    items.push({ type: "function_call", call_id: id, name, arguments: given || "{}" });
  }
  return items;
}

/** Adds a turn to `messages`; results and the question behind them are one message of the user. */
function addMessage(messages, turn) {
  const role = turn.role === "assistant" ? "assistant" : "user";
  const last = messages.at(-1);
  if (last?.role === role) last.content.push(...blocks(turn));
  else messages.push({ role, content: blocks(turn) });
  return messages;
}

function blocks(turn) {
  const { role, content, reasoning, callId } = turn;
  if (role === "tool") return [{ type: "tool_result", tool_use_id: callId, content }];
  const found = content ? [{ type: "text", text: content }] : [];
  if (role === "user") return found;
  if (reasoning) found.unshift({ type: "thinking", thinking: reasoning, signature: "" });
  return [...found, ...wholeCalls(turn).map((call) => {
    return { type: "tool_use", id: call.id, name: call.name, input: argumentsOf(call) };
  })];
}

/** `fields` without those that are undefined. */
const plain = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
