// Calls to the server: the API key, errors, streams of events.

import { ServerError, broken, unreached } from "./errors.js";
import { session } from "./storage.js";

const dialog = document.getElementById("key-dialog");
let asking = null; // the promise of a key that is being typed

/** The response to a request, which asks for an API key where the server wants one. Throws its error. */
export async function call(path, { body, signal } = {}) {
  const used = session.getItem("key");
  const response = await fetch(path, { ...request(body, used), signal }).catch(asUnreached);
  if (response.status === 401) {
    if (session.getItem("key") === used) await (asking ??= askKey());
    return call(path, { body, signal });
  }
  if (!response.ok) throw new ServerError(await errorOf(response), response.status);
  return response;
}

/** The chunks of a streamed answer. Throws the error that one holds. */
export async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(asUnreached);
    if (done) throw broken();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ServerError(chunk.error);
      yield chunk;
    }
  }
}

function request(body, key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body === undefined) return { headers };
  return { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

/** Throws an error of the network in our words, and that of who aborted as it is. */
function asUnreached(error) {
  throw error instanceof TypeError ? unreached() : error;
}

function askKey() {
  const key = dialog.querySelector("input");
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (!key.value.trim()) return dialog.showModal(); // without a key there is nothing to do here
      session.setItem("key", key.value.trim());
      [asking, key.value] = [null, ""];
      resolve();
    };
  });
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error;
  } catch {
    return { message: `${response.status} ${response.statusText}` };
  }
}
