// The functions that a model may call, as people write them down: in the form of any dialect.

import { parse } from "./conversation.js";

/** The functions in `text` as [{ name, description, parameters }]. Throws what is wrong, in words. */
export function readTools(text) {
  if (!text.trim()) return [];
  const given = parse(text);
  if (given === undefined) throw new Error("The tools in Settings are no JSON. Write a list of functions there.");
  return [given].flat().map(readTool);
}

function readTool(tool) {
  const own = tool?.function ?? tool;
  if (typeof own?.name !== "string" || !own.name) {
    throw new Error('A tool in Settings has no name. Write it as {"name": "...", "description": "...", "parameters": {...}}.');
  }
  const parameters = own.parameters ?? own.input_schema ?? { type: "object", properties: {} };
  return { name: own.name, description: own.description ?? "", parameters };
}
