// The page's controls.

import * as chat from "./chat.js";
import * as live from "./live.js";

const $ = (id) => document.getElementById(id);

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

async function copy(button, text) {
  await navigator.clipboard.writeText(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** The fields of a request that the settings give; those left empty are the server's to choose. */
function settings() {
  const [temperature, most] = [$("temperature").valueAsNumber, $("max-tokens").valueAsNumber];
  return {
    ...(Number.isNaN(temperature) ? {} : { temperature }),
    ...(Number.isNaN(most) ? {} : { max_tokens: most }),
    ...($("floor").value ? { kv_floor: $("floor").value } : {}),
    ...($("thinking").value ? { chat_template_kwargs: { enable_thinking: false } } : {}),
    system: $("system").value.trim(),
  };
}

function submit(event) {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || chat.isBusy()) return;
  $("question").value = "";
  run(() => chat.ask(question, settings()));
}

$("ask").addEventListener("submit", submit);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
$("stop").addEventListener("click", chat.stop);
document.addEventListener("keydown", (event) => event.key === "Escape" && chat.stop());
$("chat").addEventListener("click", (event) => {
  const { target } = event;
  const view = target.closest("article");
  if (target.matches(".again")) run(() => chat.askAgain(settings()));
  if (target.matches(".copy")) copy(target, chat.contentOf(view));
  if (target.matches(".edit") && !chat.isBusy()) {
    $("question").value = chat.takeBack(view);
    $("question").focus();
  }
});
$("example").addEventListener("click", () => run(() => chat.ask($("example").textContent, settings())));
$("new").addEventListener("click", () => {
  chat.clear();
  $("question").focus();
});

$("live").open = matchMedia("(min-width: 50rem)").matches; // on a phone the line of its summary is enough
document.body.classList.toggle("copies", Boolean(navigator.clipboard)); // which pages have on secure addresses alone
chat.restore();
live.start();
