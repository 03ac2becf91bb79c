// Builds elements. Texts are always text nodes: nothing here or elsewhere parses HTML.

export const $ = (id) => document.getElementById(id);

/** An element with properties (`class`, `on...`, `data`, attributes) and children (elements or texts). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null && child !== false && child !== ""));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

export function iconButton(name, label, onclick, text) {
  return h("button", { type: "button", class: "small", title: label, "aria-label": label, onclick }, icon(name), text);
}

let fading = 0;

/** Tell a screen reader, and with `isShown` everybody. */
export function announce(text, isShown = false) {
  const status = $("status");
  status.textContent = text;
  status.className = isShown ? "toast" : "hidden";
  clearTimeout(fading);
  if (isShown) fading = setTimeout(() => { status.className = "hidden"; }, 6000);
}

/** A call of a tool or its result, folded. `text`: its arguments, shown in lines where they are JSON. */
export function callCard(title, text) {
  let shown = text, name = "";
  try {
    const value = JSON.parse(text);
    name = typeof value?.name === "string" && value.arguments ? value.name : "";
    shown = JSON.stringify(name ? value.arguments : value, null, 2);
  } catch { /* no JSON, or not all of it yet */ }
  const summary = h("summary", {}, icon("tool"), title, name && h("code", {}, name));
  return h("details", { class: "call" }, summary, h("pre", { tabindex: "0" }, h("code", {}, shown)));
}

/** Copy to the clipboard. Over http, browsers give pages of this machine only the function for it. */
export async function copyText(text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const field = h("textarea", { class: "hidden" });
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.value = text;
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  announce("Copied");
}

/** Save `value` as a JSON file. */
export function download(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
