// The model that answers, by its card of /v1/models.

import { $ } from "./elements.js";
import { call } from "./server.js";
import * as settings from "./settings.js";

let card = {};

export const model = () => card;

/** Reads the card, and shows what suits the model: its name, its settings, what to ask it. */
export async function read() {
  card = (await (await call("v1/models")).json()).data[0];
  $("model").textContent = card.id;
  settings.fit(card);
  offer(card.examples ?? []);
}

function offer(questions) {
  $("such").hidden = !questions.length;
  $("examples").replaceChildren(...questions.map((question) => {
    const item = document.createElement("li");
    item.append(Object.assign(document.createElement("button"), { type: "button", textContent: question }));
    return item;
  }));
}
