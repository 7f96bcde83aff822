// A turn of a conversation on the page.

import { argumentsOf, pretty, wholeCalls } from "./conversation.js";
import { clone } from "./elements.js";
import { show } from "./markdown.js";

/** The element of a turn, not yet in the page. */
export function viewOf(turn) {
  const view = clone("turn");
  view.classList.add(turn.role);
  view.querySelector("h2").textContent = headingOf(turn);
  if (turn.role !== "assistant") view.querySelector(".again").remove();
  draw(view, turn);
  return view;
}

/** Shows a turn as it is now. What its reader has opened or written stays. */
export function draw(view, turn) {
  const text = view.querySelector(".text");
  view.classList.toggle("empty", !turn.content && !turn.calls?.length);
  if (turn.role === "user") text.textContent = turn.content;
  else if (turn.role === "tool") text.replaceChildren(code(pretty(turn.content)));
  else drawAnswer(view, text, turn);
}

/** Marks an answer as under way, or as done: then the calls in it wait for results. */
export function mark(view, turn, { isRunning }) {
  view.classList.toggle("running", isRunning);
  view.querySelector(".results")?.remove();
  if (isRunning || turn.role !== "assistant") return;
  const calls = wholeCalls(turn);
  if (calls.length) view.querySelector(".calls").append(resultsOf(calls));
}

function drawAnswer(view, text, { content, reasoning, calls, note, error }) {
  show(text, content);
  const thoughts = view.querySelector(".reasoning");
  thoughts.hidden = !reasoning;
  thoughts.querySelector("p").textContent = reasoning;
  drawCalls(view.querySelector(".calls"), calls.filter(Boolean));
  const failure = view.querySelector(".error");
  failure.hidden = !error;
  failure.textContent = error;
  view.querySelector("footer span").textContent = note.join(" · ");
}

function drawCalls(parent, calls) {
  calls.forEach((call, i) => {
    const view = parent.querySelectorAll(".call")[i] ?? parent.appendChild(clone("call"));
    view.querySelector("h3").textContent = `Calls ${call.name}`;
    view.querySelector("code").textContent = argumentsOf(call) ? pretty(call.arguments || "{}") : call.arguments;
  });
}

function resultsOf(calls) {
  const form = clone("results");
  for (const { name } of calls) {
    const field = clone("result");
    field.querySelector("span").textContent = name;
    form.lastElementChild.before(field);
  }
  return form;
}

function code(text) {
  const pre = document.createElement("pre");
  pre.append(Object.assign(document.createElement("code"), { textContent: text }));
  return pre;
}

function headingOf({ role, name }) {
  if (role === "tool") return name ? `Result of ${name}` : "Result";
  return role === "user" ? "You" : "Model";
}
