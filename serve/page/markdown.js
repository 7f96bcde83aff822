// A little Markdown as elements: code, headings, lists, bold, italics. Text stays text: nothing is parsed as HTML.

const FENCE = /^ {0,3}(```+|~~~+)\s*(\S*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/;
const INLINE = /(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|(?<![\w*])\*([^\s*](?:[^*]*?[^\s*])?)\*(?![\w*])/s;

/** Shows `text` in `parent`; blocks that are there already stay, so that a long answer grows without being redrawn. */
export function show(parent, text) {
  const blocks = split(text);
  blocks.forEach((block, i) => {
    const old = parent.children[i];
    const source = JSON.stringify(block);
    if (old?.source === source) return;
    const made = Object.assign(MAKERS[block.kind](block), { source });
    old ? old.replaceWith(made) : parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

function split(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const fence = FENCE.exec(lines[i]);
    const last = blocks.at(-1);
    if (fence) {
      const code = [];
      while (++i < lines.length && !lines[i].trimStart().startsWith(fence[1])) code.push(lines[i]);
      blocks.push({ kind: "code", language: fence[2], lines: code });
    } else if (!lines[i].trim()) {
      blocks.push({ kind: "gap" });
    } else if (HEADING.test(lines[i])) {
      blocks.push({ kind: "heading", lines: [lines[i]] });
    } else if (ITEM.test(lines[i])) {
      last?.kind === "list" ? last.lines.push(lines[i]) : blocks.push({ kind: "list", lines: [lines[i]] });
    } else if (last?.kind === "list" || last?.kind === "paragraph") {
      last.lines.push(lines[i]);
    } else {
      blocks.push({ kind: "paragraph", lines: [lines[i]] });
    }
  }
  return blocks.filter((block) => block.kind !== "gap");
}

const MAKERS = {
  code: ({ language, lines }) => {
    const pre = element("pre");
    pre.append(Object.assign(element("code"), { textContent: lines.join("\n") }));
    if (language) pre.dataset.language = language;
    return pre;
  },
  heading: ({ lines }) => {
    const [, marks, text] = HEADING.exec(lines[0]);
    return inline(element(`h${Math.min(marks.length + 2, 6)}`), text);
  },
  list: ({ lines }) => {
    const list = element("ul");
    for (const line of lines) {
      const found = ITEM.exec(line);
      if (found) list.append(item(found));
      else inline(list.lastChild, `\n${line.trim()}`);
    }
    return list;
  },
  paragraph: ({ lines }) => inline(element("p"), lines.join("\n")),
};

function item([, indent, mark, text]) {
  const made = inline(element("li"), text);
  made.dataset.mark = /\d/.test(mark) ? mark : "•";
  made.style.setProperty("--depth", Math.min(Math.floor(indent.length / 2), 6));
  return made;
}

/** Adds `text` to `parent`, with code, bold and italics as elements. */
function inline(parent, text) {
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    const [, , code, bold, italic] = found;
    parent.append(text.slice(0, found.index));
    if (code !== undefined) parent.append(Object.assign(element("code"), { textContent: code }));
    else parent.append(inline(element(bold === undefined ? "em" : "strong"), bold ?? italic));
  }
  parent.append(text);
  return parent;
}

const element = (name) => document.createElement(name);
