// The text of a turn, to be written anew in its place.

import { sendOnEnter } from "./dialogs.js";
import { clone } from "./elements.js";

/** Edits `text` in the view of a turn; the new text, or null where the user thinks better of it. */
export function edit(view, text, { word, hint }) {
  if (view.querySelector(".editor")) return Promise.resolve(null); // is edited already
  const form = clone("editor");
  const [field, [send, cancel]] = [form.querySelector("textarea"), form.querySelectorAll("button")];
  field.value = text;
  send.textContent = word;
  form.querySelector("p").textContent = hint;
  view.classList.add("edited");
  view.querySelector("footer").before(form);
  field.focus();
  return new Promise((resolve) => {
    const end = (found) => {
      form.remove();
      view.classList.remove("edited");
      view.querySelector(".edit").focus();
      resolve(found);
    };
    field.addEventListener("keydown", (event) => {
      sendOnEnter(event);
      if (event.key !== "Escape") return;
      event.stopPropagation(); // an answer under way goes on
      end(null);
    });
    cancel.addEventListener("click", () => end(null));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) end(field.value.trim());
    });
  });
}
