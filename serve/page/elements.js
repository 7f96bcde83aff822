// Elements of the page: those with an id, and copies of its templates.

export const $ = (id) => document.getElementById(id);

/** A copy of the element in the template of `id`. */
export const clone = (id) => $(id).content.firstElementChild.cloneNode(true);
