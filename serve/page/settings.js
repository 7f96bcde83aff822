// The settings of the conversation: fields of the page, as strings.

import { SETTINGS } from "./conversation.js";
import { $ } from "./elements.js";

const fields = Object.fromEntries(SETTINGS.map((name) => [name, $(name === "maxTokens" ? "max-tokens" : name)]));

export const read = () => Object.fromEntries(SETTINGS.map((name) => [name, fields[name].value]));

export function show(settings) {
  offerFloors(settings.floor ? [settings.floor] : []);
  for (const name of SETTINGS) fields[name].value = settings[name];
}

/** Offers the rungs of the server for the lowest precision. */
export function offerFloors(names) {
  const { floor } = fields;
  const known = [...floor.options].map(({ value }) => value);
  floor.append(...names.filter((name) => !known.includes(name)).map((name) => new Option(name, name)));
}

/** Shows the settings that the model of a card knows. */
export function fit(model) {
  fields.thinking.parentElement.hidden = !model.thinking_switch;
  fields.tools.parentElement.hidden = !model.tools;
}
