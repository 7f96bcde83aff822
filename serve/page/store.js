// Conversations in the browser's storage, an entry each. When it is full the oldest go.

import { parse, sound } from "./conversation.js";

const PREFIX = "qkv-engine/"; // other pages of this host may keep things there, too
const FORM = `${PREFIX}chat/1/`; // a new form of the data gets a new number, and leaves those of old ones unread
const MOST = 200; // conversations

export class Store {
  /** `storage` is a Storage of the browser. */
  constructor(storage) {
    this.storage = storage;
  }

  /** All conversations, the newest first. What cannot be read is left out. */
  list() {
    const found = keys(this.storage, FORM).map((key) => this.#read(key)).filter(Boolean);
    return found.sort((one, other) => other.at - one.at);
  }

  load(id) {
    return this.#read(FORM + id);
  }

  /** Keeps a conversation, in the place of older ones if need be; returns whether there was room. */
  save(chat) {
    while (!this.#write(chat)) if (!this.#removeOldest(chat.id)) return false;
    if (keys(this.storage, FORM).length > MOST) this.#removeOldest(chat.id);
    return true;
  }

  remove(id) {
    this.storage.removeItem(FORM + id);
  }

  /** Forgets all conversations, those of other forms as well. */
  clear() {
    for (const key of keys(this.storage, PREFIX)) this.storage.removeItem(key);
  }

  /** Whether an event of the storage, which another tab has changed, is about a conversation. */
  isAbout(event, id) {
    return event.key === null || event.key === FORM + id;
  }

  /** Removes the oldest conversation but that of `id`, if there is one. */
  #removeOldest(id) {
    const oldest = this.list().findLast((chat) => chat.id !== id);
    if (oldest) this.remove(oldest.id);
    return Boolean(oldest);
  }

  #read(key) {
    return sound(parse(this.storage.getItem(key) ?? "null"));
  }

  #write(chat) {
    try {
      this.storage.setItem(FORM + chat.id, JSON.stringify(chat));
      return true;
    } catch {
      this.remove(chat.id); // what was kept before is no longer the conversation
      return false;
    }
  }
}

function keys(storage, prefix) {
  const all = Array.from({ length: storage.length }, (_, number) => storage.key(number));
  return all.filter((key) => key.startsWith(prefix));
}
