// The conversation: questions, answers as they come, and how precisely the server kept them.

import { show } from "./markdown.js";
import { call, chunks } from "./server.js";

const KEPT = "conversation"; // name of what a reload of the tab finds again
const log = document.getElementById("chat");
const turns = []; // { role, content, view }, answers with their reasoning and note, too
let running = null; // the AbortController of the answer under way

export const isBusy = () => running !== null;
export const stop = () => running?.abort();

/** Adds a question and streams its answer. `settings` are fields of the request. */
export async function ask(question, settings) {
  add("user", question);
  await answer(settings);
}

/** Answers the last question anew. */
export async function askAgain(settings) {
  if (turns.at(-1)?.role === "assistant") turns.pop().view.remove();
  await answer(settings);
}

/** Takes back the question of a view and all after it; returns its text. */
export function takeBack(view) {
  const taken = turns.splice(turns.findIndex((turn) => turn.view === view));
  for (const turn of taken) turn.view.remove();
  keep();
  return taken[0].content;
}

export const contentOf = (view) => turns.find((turn) => turn.view === view).content;

export function clear() {
  stop();
  turns.length = 0;
  log.replaceChildren();
  keep();
}

/** Shows the conversation that the tab had before it was loaded anew. */
export function restore() {
  for (const { role, content, reasoning, words } of JSON.parse(sessionStorage.getItem(KEPT) ?? "[]")) {
    const turn = Object.assign(add(role, content), { reasoning });
    if (role !== "assistant") continue;
    turn.view.classList.remove("running");
    draw(turn);
    note(turn, words ?? ["stopped"]);
  }
}

function keep() {
  try {
    const plain = turns.map(({ role, content, reasoning, words }) => ({ role, content, reasoning, words }));
    sessionStorage.setItem(KEPT, JSON.stringify(plain));
  } catch {
    sessionStorage.removeItem(KEPT); // longer than the browser keeps
  }
}

async function answer({ system, ...settings }) {
  const messages = turns.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  const turn = add("assistant", "");
  const own = (running = new AbortController());
  const begin = performance.now();
  log.ariaBusy = true; // read out when it is whole
  try {
    const end = await stream(turn, { ...settings, messages }, own.signal);
    note(turn, describe(end, (performance.now() - begin) / 1000));
  } catch (error) {
    if (own.signal.aborted) note(turn, ["stopped"]);
    else fail(turn, error.message);
  } finally {
    turn.view.classList.remove("running");
    log.ariaBusy = false;
    if (running === own) running = null;
    keep();
  }
}

/** Shows the answer as it comes; returns its usage and the reason of its end. */
async function stream(turn, fields, signal) {
  const body = { ...fields, stream: true, stream_options: { include_usage: true } };
  const end = { usage: null, reason: null };
  turn.reasoning = "";
  let frame = 0;
  const redraw = () => {
    frame = 0;
    draw(turn);
  };
  try {
    for await (const chunk of chunks(await call("v1/chat/completions", { body, signal }))) {
      const choice = chunk.choices[0];
      turn.content += choice?.delta.content ?? "";
      turn.reasoning += choice?.delta.reasoning_content ?? "";
      end.reason = choice?.finish_reason ?? end.reason;
      end.usage = chunk.usage ?? end.usage;
      frame ||= requestAnimationFrame(redraw);
    }
  } finally {
    cancelAnimationFrame(frame);
    draw(turn);
  }
  return end;
}

function add(role, content) {
  const view = document.getElementById("turn").content.firstElementChild.cloneNode(true);
  view.classList.add(role);
  if (role === "assistant") view.classList.add("running");
  const turn = { role, content, view };
  turns.push(turn);
  log.append(view);
  if (role === "user") view.querySelector(".text").textContent = content;
  keep();
  log.scrollTop = log.scrollHeight;
  return turn;
}

function draw({ view, content, reasoning }) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40; // who has scrolled up reads on there
  show(view.querySelector(".text"), content);
  const thoughts = view.querySelector("details");
  thoughts.hidden = !reasoning;
  thoughts.querySelector("p").textContent = reasoning;
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function describe({ usage, reason }, seconds) {
  const words = [`${usage.completion_tokens} tokens`, `${(usage.completion_tokens / seconds).toFixed(1)} tok/s`];
  if (usage.kv_bits !== null) words.push(`KV at ${+usage.kv_bits.toFixed(2)} bits`);
  if (reason === "length") words.push("cut off at the longest length");
  return words;
}

function note(turn, words) {
  turn.words = words;
  turn.view.querySelector("footer span").textContent = words.join(" · ");
}

function fail({ view }, message) {
  const shown = Object.assign(document.createElement("p"), { className: "error", textContent: message });
  shown.setAttribute("role", "alert");
  view.querySelector("footer").before(shown);
  log.scrollTop = log.scrollHeight;
}
