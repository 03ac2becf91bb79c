// Markdown in full as DOM nodes: marked reads it, KaTeX sets formulas, highlight.js tells the parts of code.
//
// Nothing here makes or parses HTML, so there is nothing to sanitise: marked only gives its tokens, highlight.js its tree,
// and KaTeX builds elements. HTML in an answer is text. Links lead to http, https and mailto, images become links.
//
// The text of a token is looked up in the source from where the last one ended, so that `paint(parent, start, end)` can
// mark who proposed which part. Text that is not there as it is (an entity) is drawn without a mark.

import { callCard, h } from "./dom.js";
import { libraries } from "./libraries.js";
import { codeBlock, drawBlocks } from "./markdown.js";

// A formula's length is limited, so that a text of nothing but beginnings does not take its square in time.
const BLOCK_MATH = /^ {0,3}(?:\$\$([\s\S]{1,4000}?)\$\$|\\\[([\s\S]{1,4000}?)\\\])[ \t]*(?:\n+|$)/;
const INLINE_MATH = /^(?:\$\$([^$]{1,1000}?)\$\$|\\\(([\s\S]{1,1000}?)\\\)|\\\[([\s\S]{1,1000}?)\\\]|\$(?!\s)((?:\\.|[^$\\\n]){1,1000}?)(?<!\s)\$(?!\w))/;
const CALL = /^<(tool_call|tool_response)>\s*([\s\S]*?)\s*(?:<\/\1>\s*|$)/;
const ENTITY = /(&(?:#\d{1,6}|#x[\da-f]{1,6}|[a-z]{2,8});)/i;
const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…", mdash: "—",
  ndash: "–", times: "×", divide: "÷", deg: "°", plusmn: "±", euro: "€", pound: "£", rarr: "→", larr: "←", le: "≤", ge: "≥", ne: "≠",
};
const MOST_OPEN_CODE = 6000; // characters of a block that still grows, which is highlighted anew for each drawing
let lexer = null, katex = null, highlighter = null;

/** Load the libraries, where the server has them. `renderRich` may be used if this is true. */
export async function loadRich() {
  if (!libraries.includes("marked")) return false;
  try {
    const [marked, highlight] = await Promise.all([import("./vendor/marked.js"), import("./vendor/highlight.js"), import("./vendor/katex.js")]);
    lexer = new marked.Marked({ gfm: true, extensions: EXTENSIONS });
    highlighter = highlight.default;
    katex = self.katex;
  } catch (error) {
    console.warn("the libraries of the page cannot be read:", error);
    return false;
  }
  document.head.append(h("link", { rel: "stylesheet", href: "/static/vendor/katex.css" }));
  return true;
}

const place = (found) => (found < 0 ? undefined : found);
const EXTENSIONS = [
  {
    name: "math", level: "block",
    start: (source) => place(source.search(/(?<=^|\n) {0,3}(?:\$\$|\\\[)/)),
    tokenizer: (source) => mathToken(BLOCK_MATH.exec(source), true),
  },
  {
    name: "inlineMath", level: "inline",
    start: (source) => place(source.search(/\$|\\[([]/)),
    tokenizer: (source) => mathToken(INLINE_MATH.exec(source), false),
  },
  {
    name: "call", level: "block",
    start: (source) => place(source.search(/(?<=^|\n)<tool_(?:call|response)>/)),
    tokenizer(source) {
      const [raw, kind, text] = CALL.exec(source) ?? [];
      return raw && { type: "call", raw, kind, text };
    },
  },
];

function mathToken(match, isBlock) {
  if (!match) return undefined;
  const [raw, ...texts] = match;
  const isDisplay = isBlock || raw.startsWith("$$") || raw.startsWith("\\[");
  return { type: isBlock ? "math" : "inlineMath", raw, text: texts.find((each) => each !== undefined), isDisplay };
}

const NUM_GROWING = 3; // the last tokens of a text that grows: more may join a list behind an empty line
const DEFINITION = /^ {0,3}\[[^\]]+\]:/m;
const read = new WeakMap(); // the element of a text: what was read for it, {source, tokens}

/** Draw `source` into `parent`, which only this function fills. */
export function renderRich(parent, source, paint) {
  const clean = source.replace(/\r/g, " "); // marked would make it shorter, and its tokens would be elsewhere
  if (DEFINITION.test(clean)) { // any link may have got its address
    read.delete(parent);
    parent.replaceChildren();
  }
  let end = 0;
  const blocks = tokensOf(parent, clean).map((token) => ({ kind: token.type, token, start: end, end: end += token.raw.length }));
  drawBlocks(parent, blocks.filter(({ kind }) => BLOCKS[kind] && kind !== "space" && kind !== "def"), (block) => {
    const drawing = new Drawing(clean, paint, block, block.end === clean.length);
    return BLOCKS[block.kind](drawing, block.token);
  });
}

/** The tokens of a text. Where it goes on with what was read before, only the end is read anew. */
function tokensOf(parent, source) {
  const before = read.get(parent);
  const kept = before && source.startsWith(before.source) ? before.tokens.slice(0, -NUM_GROWING) : [];
  const start = kept.reduce((length, token) => length + token.raw.length, 0);
  const tokens = [...kept, ...lexer.lexer(source.slice(start))];
  read.set(parent, { source, tokens });
  return tokens;
}

/** One block while it is drawn. `at`: how far the source is drawn; `isOpen`: whether more of the block may come. */
class Drawing {
  constructor(source, paint, { start, end }, isOpen) {
    this.source = source;
    this.paint = paint;
    this.at = start;
    this.end = end;
    this.isOpen = isOpen;
  }

  /** The place of `text` behind what is drawn; -1 if it is not in this block as it is. */
  find(text) {
    const found = this.source.indexOf(text, this.at);
    return found >= 0 && found + text.length <= this.end ? found : -1;
  }

  /** Draw a text as the source has it. */
  exactly(parent, text) {
    const found = this.find(text);
    if (found >= 0) {
      this.paint(parent, found, found + text.length);
      this.at = found + text.length;
    } else if (text.trimEnd().includes("\n")) {
      for (const line of text.split(/(?<=\n)/)) this.exactly(parent, line); // lines lack their indentation
    } else parent.append(text);
    return parent;
  }

  text(parent, text) {
    for (const part of text.split(ENTITY)) {
      const known = ENTITY.test(part) ? decoded(part.slice(1, -1)) : undefined;
      if (known !== undefined) parent.append(known);
      else if (part) this.exactly(parent, part);
    }
    return parent;
  }

  /** Draw tokens of a line, or of a list item, which may hold blocks. */
  inline(parent, tokens = []) {
    for (const token of tokens) {
      const found = this.find(token.raw);
      if (found >= 0) this.at = found;
      const drawn = (INLINE[token.type] ?? BLOCKS[token.type])?.(this, token, parent);
      if (drawn && drawn !== parent) parent.append(drawn);
      else if (drawn === undefined) this.exactly(parent, token.raw);
      if (found >= 0) this.at = Math.max(this.at, found + token.raw.length);
    }
    return parent;
  }
}

function decoded(name) {
  if (!name.startsWith("#")) return ENTITIES[name];
  const code = name[1].toLowerCase() === "x" ? parseInt(name.slice(2), 16) : parseInt(name.slice(1), 10);
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : undefined;
}

const BLOCKS = {
  space: (drawing, token, parent) => parent, // in a list item
  def: (drawing, token, parent) => parent,
  hr: () => h("hr"),
  heading: (drawing, token) => drawing.inline(h(`h${Math.min(token.depth + 2, 6)}`), token.tokens),
  paragraph: (drawing, token) => drawing.inline(h("p"), token.tokens),
  html: (drawing, token) => drawing.exactly(h("p"), token.raw.replace(/\n+$/, "")),
  blockquote: (drawing, token) => drawing.inline(h("blockquote"), token.tokens),
  call: (_, token) => callCard(token.kind === "tool_call" ? "Call" : "Result of the call", token.text),
  math: (_, token) => h("div", { class: "math", tabindex: "0" }, formula(token)),
  code(drawing, token) {
    const language = (token.lang ?? "").trim().split(/\s/)[0];
    const grows = drawing.isOpen && token.text.length > MOST_OPEN_CODE;
    drawing.at = Math.max(drawing.at, drawing.source.indexOf("\n", drawing.at)); // behind the language
    return codeBlock(language, (code) => {
      if (grows || !highlighter.getLanguage(language)) drawing.exactly(code, token.text);
      else colour(drawing, code, highlighter.highlight(token.text, { language, ignoreIllegals: true })._emitter.rootNode);
    });
  },
  list(drawing, token) {
    const list = h(token.ordered ? "ol" : "ul", token.ordered ? { start: token.start } : {});
    for (const item of token.items) list.append(drawing.inline(h("li", { class: item.task && "task" }), item.tokens));
    return list;
  },
  table(drawing, token) {
    const cell = (tag) => (each) => drawing.inline(h(tag, { class: each.align && `to-${each.align}` }), each.tokens);
    const head = h("thead", {}, h("tr", {}, ...token.header.map(cell("th"))));
    const body = h("tbody", {}, ...token.rows.map((row) => h("tr", {}, ...row.map(cell("td")))));
    return h("div", { class: "table", tabindex: "0" }, h("table", {}, head, body));
  },
  text: (drawing, token) => drawing.inline(h("p"), token.tokens ?? [token]),
};

const INLINE = {
  text: (drawing, token, parent) => (token.tokens ? drawing.inline(parent, token.tokens) : drawing.text(parent, token.text)),
  escape: (drawing, token, parent) => drawing.exactly(parent, token.text),
  br: () => h("br"),
  html: (drawing, token, parent) => (/^<br\s*\/?>$/i.test(token.raw) ? h("br") : drawing.exactly(parent, token.raw)),
  strong: (drawing, token) => drawing.inline(h("strong"), token.tokens),
  em: (drawing, token) => drawing.inline(h("em"), token.tokens),
  del: (drawing, token) => drawing.inline(h("del"), token.tokens),
  codespan: (drawing, token) => drawing.exactly(h("code"), token.text),
  checkbox: (_, token) => h("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": token.checked ? "done" : "to do" }),
  link: (drawing, token, parent) => link(drawing, token, parent, token.tokens),
  image: (drawing, token, parent) => link(drawing, token, parent, token.text ? token.tokens : [{ type: "text", raw: token.href, text: token.href }]),
  inlineMath: (_, token) => h("span", { class: token.isDisplay ? "math" : "" }, formula(token)),
};

function link(drawing, token, parent, tokens) {
  if (!/^(https?:\/\/|mailto:)/i.test(token.href)) return drawing.exactly(parent, token.raw);
  const more = { target: "_blank", rel: "noopener noreferrer nofollow", title: token.title };
  return drawing.inline(h("a", { href: token.href, ...more }), tokens);
}

function formula({ text, raw, isDisplay }) {
  const element = h("span");
  try {
    katex.render(text, element, { displayMode: isDisplay, trust: false, strict: "ignore", maxSize: 30, maxExpand: 500 });
  } catch {
    return h("code", {}, raw); // no formula, or one that is not complete
  }
  return element;
}

/** Draw highlight.js's tree of a code: texts, and parts with a scope. */
function colour(drawing, parent, { children }) {
  for (const child of children) {
    if (typeof child === "string") drawing.exactly(parent, child);
    else {
      const part = h("span", { class: child.scope && `hljs-${child.scope.split(".")[0]}` });
      colour(drawing, part, child);
      parent.append(part);
    }
  }
}
