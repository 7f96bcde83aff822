// The browser's storage: `local` for all tabs and for good, `session` for this tab until it is closed.

/** A storage for as long as the page, where the user lets it keep nothing. */
class Memory {
  #items = new Map();

  get length() {
    return this.#items.size;
  }

  key(number) {
    return [...this.#items.keys()][number] ?? null;
  }

  getItem(key) {
    return this.#items.get(key) ?? null;
  }

  setItem(key, value) {
    this.#items.set(key, String(value));
  }

  removeItem(key) {
    this.#items.delete(key);
  }
}

export const local = storage(() => localStorage);
export const session = storage(() => sessionStorage);

function storage(get) {
  try {
    return get();
  } catch {
    return new Memory();
  }
}
