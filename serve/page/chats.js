// The list of conversations.

import { titleOf } from "./conversation.js";
import { $, clone } from "./elements.js";

/** Shows `chats`, of which that of the id `current` is marked. `on` has what to do with one: `open`, `remove`. */
export function list(chats, current, on) {
  $("list").replaceChildren(...chats.map((chat) => entry(chat, chat.id === current, on)));
  $("kept").textContent = chats.length
    ? "Kept in this browser alone, in clear."
    : "Conversations will be kept in this browser alone, in clear.";
  $("forget").disabled = !chats.length;
}

function entry(chat, isCurrent, { open, remove }) {
  const view = clone("entry");
  const [opener, remover] = view.children;
  const title = titleOf(chat);
  Object.assign(opener, { textContent: title, title });
  if (isCurrent) opener.setAttribute("aria-current", "true");
  remover.setAttribute("aria-label", `Delete ${title}`);
  opener.addEventListener("click", () => open(chat.id));
  remover.addEventListener("click", () => remove(chat));
  return view;
}
