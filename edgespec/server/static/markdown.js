// Light Markdown as DOM nodes: paragraphs, headings, lists, quotes, tables, code, emphasis, links. It draws where the
// libraries of rich.js are missing, and until they are loaded.
//
// Every text node is a slice of the source, so that `paint(parent, start, end)` can mark who proposed which part of it.
// Blocks that did not change since the last call keep their elements: a long answer is not built again for each token.

import { copyText, h, iconButton } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const HEADING = /^(#{1,6})\s+/;
const INLINE = /(`+)([^`]+?)\1(?!`)|(\*\*|(?<!\w)__)(?=\S)([^\n]*?\S)\3(?!(?<=__)\w)|(?<![\w*])([*_])(?=[^\s*_])([^*_\n]*?[^\s*_])\5(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

/** Draw `source` into `parent`, which only this function fills. */
export function render(parent, source, paint) {
  drawBlocks(parent, blocks(source), (block) => BUILD[block.kind](block, source, paint));
}

/** Have `parent` hold the elements that `build` makes of blocks {kind, start, end}; all but the last are kept. */
export function drawBlocks(parent, found, build) {
  const old = [...parent.children];
  found.forEach((block, index) => {
    const key = `${block.kind} ${block.start} ${block.end} ${block.open ?? ""}`;
    if (old[index]?.dataset.key === key && index < found.length - 1) return;
    const element = build(block);
    element.dataset.key = key;
    if (old[index]) old[index].replaceWith(element);
    else parent.append(element);
  });
  old.slice(found.length).forEach((element) => element.remove());
}

/** A block of code with its head; `fill(code)` writes it. */
export function codeBlock(language, fill) {
  const code = h("code");
  fill(code);
  const copy = iconButton("copy", "Copy code", () => copyText(code.textContent));
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copy);
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, code));
}

function lines(source) {
  const found = [];
  for (let start = 0; start <= source.length;) {
    const newline = source.indexOf("\n", start);
    const end = newline < 0 ? source.length : newline;
    found.push({ start, end, text: source.slice(start, end) });
    start = end + 1;
  }
  return found;
}

/** The kind of block that a line begins. */
function kindOf(line, next) {
  if (FENCE.test(line.text)) return "code";
  if (HEADING.test(line.text)) return "heading";
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line.text)) return "rule";
  if (/^\s*>/.test(line.text)) return "quote";
  if (ITEM.test(line.text)) return "list";
  if (line.text.includes("|") && next && /^\s*\|?\s*:?-{2,}:?\s*(\||$)[\s|:-]*$/.test(next.text)) return "table";
  return "text";
}

function blocks(source) {
  const all = lines(source), found = [];
  for (let i = 0; i < all.length;) {
    if (!all[i].text.trim()) { i++; continue; }
    const kind = kindOf(all[i], all[i + 1]), first = i++;
    let open = false;
    if (kind === "code") {
      const mark = FENCE.exec(all[first].text)[1];
      const closes = (line) => line.text.trim().startsWith(mark) && !line.text.trim().slice(mark.length).replaceAll(mark[0], "").trim();
      while (i < all.length && !closes(all[i])) i++;
      open = i >= all.length;
      i++;
    } else if (kind !== "heading" && kind !== "rule") {
      while (i < all.length && goesOn(kind, all[i], all[i + 1])) i++;
    }
    const own = all.slice(first, i);
    found.push({ kind, open, lines: own, start: own[0].start, end: own.at(-1).end });
  }
  return found;
}

function goesOn(kind, line, next) {
  const other = kindOf(line, next);
  if (kind === "list") return other !== "code" && (other === "list" || /^\s{2,}\S/.test(line.text) || (!line.text.trim() && next && ITEM.test(next.text)));
  if (!line.text.trim()) return false;
  return kind === "table" ? line.text.includes("|") : other === kind || (kind === "quote" && other === "text");
}

const BUILD = {
  text: (block, source, paint) => inlineInto(h("p"), source, block.start, block.end, paint),
  rule: () => h("hr"),
  heading(block, source, paint) {
    const mark = HEADING.exec(block.lines[0].text);
    return inlineInto(h(`h${Math.min(mark[1].length + 2, 6)}`), source, block.start + mark[0].length, block.end, paint);
  },
  quote(block, source, paint) {
    const element = h("blockquote");
    for (const line of block.lines) {
      inlineInto(element, source, line.start + /^\s*>? ?/.exec(line.text)[0].length, line.end, paint);
      element.append("\n");
    }
    return element;
  },
  code(block, source, paint) {
    const [first, ...rest] = block.lines, body = block.open ? rest : rest.slice(0, -1);
    const indent = /^\s*/.exec(first.text)[0].length; // of a fence in a list, whose lines have it too
    return codeBlock(FENCE.exec(first.text)[2], (code) => body.forEach((line, index) => {
      const own = Math.min(/^\s*/.exec(line.text)[0].length, indent);
      paint(code, line.start + own, line.end + (index < body.length - 1));
    }));
  },
  list(block, source, paint) {
    const root = h("div", { class: "list" }), open = []; // open: the lists around the current item
    for (const line of block.lines) {
      const mark = ITEM.exec(line.text);
      if (!mark) {
        const item = open.at(-1)?.list.lastElementChild;
        if (item && line.text.trim()) inlineInto(item, source, line.start - 1, line.end, paint);
        continue;
      }
      const indent = mark[1].replaceAll("\t", "    ").length, ordered = /\d/.test(mark[2]);
      while (open.length && (open.at(-1).indent > indent || (open.at(-1).indent === indent && open.at(-1).ordered !== ordered))) open.pop();
      if (!open.length || open.at(-1).indent < indent) {
        const list = h(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark[2], 10) } : {});
        (open.at(-1)?.list.lastElementChild ?? root).append(list);
        open.push({ list, indent, ordered });
      }
      open.at(-1).list.append(inlineInto(h("li"), source, line.start + mark[0].length, line.end, paint));
    }
    return root;
  },
  table(block, source, paint) {
    const row = (line, tag) => {
      const element = h("tr");
      for (const cell of line.text.matchAll(/(?<=^|\|)(?:\\\||[^|])+/g)) {
        if (!cell[0].trim() && (cell.index === 0 || cell.index + cell[0].length === line.text.length)) continue;
        const start = line.start + cell.index + /^\s*/.exec(cell[0])[0].length;
        element.append(inlineInto(h(tag), source, start, start + cell[0].trim().length, paint));
      }
      return element;
    };
    const [head, , ...body] = block.lines;
    const table = h("table", {}, h("thead", {}, row(head, "th")), h("tbody", {}, ...body.map((line) => row(line, "td"))));
    return h("div", { class: "table", tabindex: "0" }, table);
  },
};

/** Emphasis, code and links of source[start:end]. */
function inlineInto(parent, source, start, end, paint, depth = 0) {
  const text = source.slice(start, end);
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, ticks, , strong, , em, , label, url] = match;
    if (match.index > at) paint(parent, start + at, start + match.index);
    const mark = (ticks ?? strong ?? em ?? "[").length, from = start + match.index + mark;
    const to = label === undefined ? start + match.index + whole.length - mark : from + label.length;
    if (ticks) {
      const code = h("code");
      paint(code, from, to);
      parent.append(code);
    } else {
      const inner = label === undefined ? h(strong ? "strong" : "em")
        : h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" });
      parent.append(depth < 4 ? inlineInto(inner, source, from, to, paint, depth + 1) : inner);
      if (depth >= 4) paint(inner, from, to);
    }
    at = match.index + whole.length;
  }
  if (at < text.length) paint(parent, start + at, end);
  return parent;
}
