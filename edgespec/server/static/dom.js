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
  element.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
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

/** Tell a screen reader. */
export function announce(text) {
  $("status").textContent = text;
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
