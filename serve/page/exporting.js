// The conversation as JSON for other programs.

import { DIALECTS, untilQuestion } from "./bodies.js";
import { titleOf } from "./conversation.js";
import { copy } from "./dialogs.js";
import { $ } from "./elements.js";

const dialog = $("export");
let shown = null; // { chat, model }

export function open(chat, model) {
  shown = { chat, model };
  draw();
  dialog.showModal();
}

function draw() {
  const { chat, model } = shown;
  const { path, body } = DIALECTS[$("dialect").value];
  const turns = $("until-question").checked ? untilQuestion(chat.turns) : chat.turns;
  try {
    $("exported").value = JSON.stringify(body({ ...chat, turns }, model), null, 2);
    $("export-path").textContent = `POST ${new URL(path, document.baseURI)}`;
  } catch (error) {
    $("exported").value = "";
    $("export-path").textContent = error.message; // of tools that cannot be read
  }
}

function download() {
  const words = titleOf(shown.chat).toLowerCase().match(/[\p{L}\p{N}]+/gu)?.slice(0, 6) ?? ["chat"];
  const url = URL.createObjectURL(new Blob([$("exported").value], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url });
  link.download = `${words.join("-")}.${$("dialect").value}.json`;
  link.click();
  URL.revokeObjectURL(url);
}

$("dialect").addEventListener("change", draw);
$("until-question").addEventListener("change", draw);
$("download").addEventListener("click", download);
dialog.querySelector(".copy").addEventListener("click", ({ target }) => copy(target, $("exported").value));
