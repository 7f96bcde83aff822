// The conversation that is shown: its turns, and the answer under way.

import { chatBody } from "./bodies.js";
import { newAnswer, take, waitingCalls } from "./conversation.js";
import { $ } from "./elements.js";
import { inWords } from "./errors.js";
import { model } from "./model.js";
import { call, chunks } from "./server.js";
import * as settings from "./settings.js";
import { draw, mark, viewOf } from "./turns.js";

const NOT_RUN = "The tool was not run."; // what a call gives whose result nobody waits for
const log = $("chat");
let chat = null;
let running = null; // { turn, control } of the answer under way
let keep = () => {}; // what is done with a conversation that has changed

export const current = () => chat;
export const isBusy = () => running !== null;
export const stop = () => running?.control.abort();
export const indexOf = (view) => [...log.children].indexOf(view);

/** `onChange` is called with a conversation that has changed. */
export function start(onChange) {
  keep = onChange;
}

/** Shows a conversation in the place of that before, whose answer ends where it is. */
export function open(next) {
  leave();
  chat = next;
  log.replaceChildren(...chat.turns.map(viewOf));
  settle();
  settings.show(chat.settings);
  log.scrollTop = log.scrollHeight;
}

/** Ends the answer under way at once, and keeps what has come. */
export function leave() {
  if (!running) return;
  stop();
  running.turn.note = ["stopped"];
  finish();
}

/** Adds a question and streams its answer. Calls that wait for results have none then. */
export async function ask(question) {
  addResults(() => NOT_RUN);
  add({ role: "user", content: question });
  await answer();
}

/** Adds the results of the calls that wait, and goes on. */
export async function giveResults(results) {
  addResults((_, number) => results[number]);
  await answer();
}

/** Answers anew, in the place of the answer of this number and all that follows. */
export async function askAgain(number) {
  dropFrom(number);
  await answer();
}

/** Puts `content` in the place of a question or a result, and answers in the place of all that follows. */
export async function rewrite(number, content) {
  change(number, content);
  dropFrom(number + 1);
  await answer();
}

/** Puts `content` in the place of an answer's text. */
export function correct(number, content) {
  change(number, content);
  keep(chat);
}

function change(number, content) {
  chat.turns[number].content = content;
  draw(log.children[number], chat.turns[number]);
}

function dropFrom(number) {
  chat.turns.length = Math.min(chat.turns.length, number);
  while (log.children.length > chat.turns.length) log.lastChild.remove();
}

function addResults(resultOf) {
  const calls = waitingCalls(chat);
  calls.forEach(({ id, name }, number) => add({ role: "tool", callId: id, name, content: resultOf(name, number) }));
}

function add(turn) {
  chat.turns.push(turn);
  log.append(viewOf(turn));
  keep(chat);
  log.scrollTop = log.scrollHeight;
  return turn;
}

async function answer() {
  chat.settings = settings.read();
  const turn = add(newAnswer());
  const own = (running = { turn, control: new AbortController() });
  const begin = performance.now();
  mark(log.lastChild, turn, { isRunning: true });
  say("The model answers.");
  try {
    const end = await stream(turn, own.control.signal);
    turn.note = describe(end, (performance.now() - begin) / 1000);
  } catch (error) {
    if (own.control.signal.aborted) turn.note = ["stopped"];
    else turn.error = inWords(error);
  }
  if (running === own) finish(); // else another conversation was opened
}

function finish() {
  const { turn } = running;
  running = null;
  draw(log.lastChild, turn);
  settle();
  keep(chat);
  say(turn.error || `${turn.content} ${turn.note.includes("stopped") ? "Stopped." : ""}`);
}

/** Lets the calls of the last answer wait for results. */
function settle() {
  if (chat.turns.length) mark(log.lastChild, chat.turns.at(-1), { isRunning: false });
}

/** Shows the answer as it comes; returns its usage and the reason of its end. */
async function stream(turn, signal) {
  const asked = chatBody({ ...chat, turns: chat.turns.slice(0, -1) }, model());
  const body = { ...asked, stream: true, stream_options: { include_usage: true } };
  const [end, view] = [{ usage: null, reason: null }, log.lastChild];
  let frame = 0;
  const redraw = () => {
    frame = 0;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40; // who has scrolled up reads on there
    draw(view, turn);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
  try {
    for await (const chunk of chunks(await call("v1/chat/completions", { body, signal }))) {
      const choice = chunk.choices[0];
      take(turn, choice?.delta ?? {});
      end.reason = choice?.finish_reason ?? end.reason;
      end.usage = chunk.usage ?? end.usage;
      frame ||= requestAnimationFrame(redraw);
    }
  } finally {
    cancelAnimationFrame(frame);
    redraw();
  }
  return end;
}

function describe({ usage, reason }, seconds) {
  const words = [`${usage.completion_tokens} tokens`, `${(usage.completion_tokens / seconds).toFixed(1)} tok/s`];
  if (usage.kv_bits !== null) words.push(`KV at ${+usage.kv_bits.toFixed(2)} bits`);
  if (reason === "length") words.push("cut off at the longest length");
  return words;
}

/** Tells those who hear the page: once the answer is whole, not each token. */
function say(text) {
  $("said").textContent = text;
}
