// The page's controls.

import * as chat from "./chat.js";
import { list } from "./chats.js";
import { fresh } from "./conversation.js";
import { confirmed, copy, sendOnEnter } from "./dialogs.js";
import { edit } from "./editor.js";
import { $ } from "./elements.js";
import * as exporting from "./exporting.js";
import { readConversation } from "./importing.js";
import * as live from "./live.js";
import { model, read } from "./model.js";
import * as settings from "./settings.js";
import { local, session } from "./storage.js";
import { Store } from "./store.js";

const OPEN = "chat"; // name of the conversation that a reload of the tab finds again
const store = new Store(local);

// ---- answers

async function run(work) {
  if (chat.isBusy()) return;
  const working = work();
  showState();
  await working;
  showState();
}

function showState() {
  $("send").hidden = chat.isBusy();
  $("stop").hidden = !chat.isBusy();
}

function ask(question) {
  if (question && !chat.isBusy()) run(() => chat.ask(question));
}

function submit(event) {
  event.preventDefault();
  if (chat.isBusy()) return;
  const question = $("question").value.trim();
  $("question").value = "";
  ask(question);
}

// ---- turns

const ACTIONS = { copy: copyTurn, again: regenerate, edit: editTurn };

async function act({ target }) {
  const [action] = Object.keys(ACTIONS).filter((name) => target.matches(`footer .${name}`));
  if (action) await ACTIONS[action](target.closest("article"), target);
}

function copyTurn(view, button) {
  const { content, calls } = turnOf(view);
  copy(button, content || JSON.stringify(calls, null, 2));
}

async function regenerate(view) {
  const number = chat.indexOf(view);
  const later = chat.current().turns.length - number - 1;
  if (later && !(await confirmed(`This drops ${turns(later)} below.`, "Regenerate"))) return;
  chat.leave();
  $("chat").focus();
  run(() => chat.askAgain(number));
}

async function editTurn(view) {
  const [number, turn] = [chat.indexOf(view), turnOf(view)];
  const isAnswer = turn.role === "assistant";
  const later = chat.current().turns.length - number - 1;
  const drops = later ? `Sending it drops ${turns(later)} below.` : "";
  const words = isAnswer ? { word: "Keep", hint: "Nothing is sent." } : { word: "Send", hint: drops };
  const text = await edit(view, turn.content, words);
  if (text === null || turnOf(view) !== turn) return;
  if (isAnswer) return chat.correct(number, text);
  chat.leave();
  $("chat").focus();
  run(() => chat.rewrite(number, text));
}

function giveResults(event) {
  event.preventDefault();
  if (!event.target.matches(".results")) return;
  const results = [...event.target.querySelectorAll("textarea")].map(({ value }) => value);
  $("chat").focus();
  run(() => chat.giveResults(results));
}

const turnOf = (view) => chat.current().turns[chat.indexOf(view)];
const turns = (number) => (number === 1 ? "the turn" : `the ${number} turns`);

// ---- conversations

function open(next) {
  chat.open(next);
  session.setItem(OPEN, next.id);
  showList();
  showState();
}

function newChat() {
  open(fresh(settings.read()));
}

function keep(changed) {
  changed.at = Date.now();
  showList(store.save(changed));
}

function showList(isKept = true) {
  list(store.list(), chat.current().id, { open: choose, remove });
  $("export-chat").disabled = !chat.current().turns.length;
  if (!isKept) $("kept").textContent = "This browser has no room to keep this conversation. Export it.";
}

function choose(id) {
  const found = store.load(id);
  if (found) open(found);
  $("chats").hidePopover();
  $("question").focus();
}

async function remove({ id }) {
  if (!(await confirmed("This conversation will be gone.", "Delete"))) return;
  if (id === chat.current().id) newChat();
  store.remove(id);
  showList();
  ($("list").querySelector("button") ?? $("new")).focus();
}

async function forget() {
  if (!(await confirmed("All conversations in this browser will be gone.", "Forget all"))) return;
  newChat();
  store.clear();
  showList();
  $("chats").hidePopover();
  $("question").focus();
}

/** Opens the conversation of an exported file; a question at its end is answered. */
async function importChat({ target }) {
  const [file] = target.files;
  if (!file) return;
  try {
    open({ ...fresh(), ...readConversation(await file.text(), model()) });
  } catch (error) {
    showProblem(error.message);
    return;
  } finally {
    target.value = ""; // the same file may be chosen again
  }
  showProblem("");
  keep(chat.current());
  $("chats").hidePopover();
  $("question").focus();
  const { turns: all } = chat.current();
  if (all.at(-1).role !== "assistant") run(() => chat.askAgain(all.length));
}

function showProblem(words) {
  $("problem").textContent = words;
  $("problem").hidden = !words;
}

/** What another tab did to the conversations. */
function follow(event) {
  const { id, turns: shown } = chat.current();
  if (store.isAbout(event, id) && shown.length) {
    const kept = store.load(id);
    if (kept && !chat.isBusy()) open(kept);
    if (!kept) {
      newChat();
      store.remove(id);
    }
  }
  showList();
}

// ---- what is heard

$("ask").addEventListener("submit", submit);
$("question").addEventListener("keydown", sendOnEnter);
$("stop").addEventListener("click", () => {
  chat.stop();
  $("question").focus(); // the button will be gone
});
$("examples").addEventListener("click", ({ target }) => target.matches("button") && ask(target.textContent));
$("chat").addEventListener("click", act);
$("chat").addEventListener("submit", giveResults);
$("chat").addEventListener("keydown", (event) => event.target.matches(".results textarea") && sendOnEnter(event));
$("export-chat").addEventListener("click", () => {
  chat.current().settings = settings.read();
  exporting.open(chat.current(), model());
});
$("import-chat").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", importChat);
$("forget").addEventListener("click", forget);
$("settings").addEventListener("change", () => {
  chat.current().settings = settings.read();
  if (chat.current().turns.length) keep(chat.current());
});
$("new").addEventListener("click", () => {
  newChat();
  $("question").focus();
});
document.addEventListener("keydown", ({ key }) => {
  if (key === "Escape" && !document.querySelector("dialog[open], :popover-open")) chat.stop();
});
addEventListener("storage", follow);
addEventListener("pagehide", chat.leave);

const wide = matchMedia("(min-width: 50rem)");
const unfold = () => ($("live").open = wide.matches); // on a phone the line of its summary is enough
wide.addEventListener("change", unfold);
unfold();
document.body.classList.toggle("copies", Boolean(navigator.clipboard)); // which pages have on secure addresses alone
chat.start(keep);
open(store.load(session.getItem(OPEN)) ?? fresh());
live.start(read);
