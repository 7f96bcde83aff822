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

/** The fields of a request that the settings give; those left empty are the server's to choose. */
function settings() {
  const [temperature, most] = [$("temperature").valueAsNumber, $("max-tokens").valueAsNumber];
  return {
    ...(Number.isNaN(temperature) ? {} : { temperature }),
    ...(Number.isNaN(most) ? {} : { max_tokens: most }),
    ...($("floor").value ? { kv_floor: $("floor").value } : {}),
  };
}

function submit(event) {
  event?.preventDefault();
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
  if (event.target.matches(".again")) run(() => chat.askAgain(settings()));
});
$("new").addEventListener("click", () => {
  chat.clear();
  $("question").focus();
});

$("live").open = matchMedia("(min-width: 50rem)").matches; // on a phone the line of its summary is enough
live.start();
