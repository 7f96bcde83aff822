// Questions to the user, and text for the clipboard.

import { $ } from "./elements.js";

/** Asks whether to do what cannot be undone; `word` is that of the button. */
export function confirmed(question, word) {
  const dialog = $("confirm");
  $("asked").textContent = question;
  dialog.querySelector("[value=yes]").textContent = word;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => dialog.open || resolve(dialog.returnValue === "yes"); // the last question's may come late
  });
}

/** Copies `text`; the button says that it did, or that the browser did not let it. */
export async function copy(button, text) {
  button.textContent = await navigator.clipboard.writeText(text).then(() => "Copied", () => "Not allowed");
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** Enter sends the form of a field, as in most chats; with Shift it begins a line. */
export function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}
