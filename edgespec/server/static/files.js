// Files of the next message: text files, and the text of PDFs. By button, paste or drop; long pasted texts become one.

import { $, announce, h, iconButton } from "./dom.js";
import { libraries } from "./libraries.js";

/** @typedef {import("./thread.js").TextFile} TextFile */

const MOST_BYTES = 4 << 20; // of a text: the server takes bodies of 8 MiB
const MOST_PDF_BYTES = 64 << 20;
const LONG_PASTE = 4000; // characters
const MOST_SHOWN = 200_000; // characters of a file in its dialog
const TEXT_ONLY = "Only text files and PDFs can be read.";

/** @type {TextFile[]} */
let attached = [];
let numReading = 0;

/** The files of the message that is being written, which has them from now on. */
export function takeFiles() {
  const files = attached;
  attached = [];
  draw();
  return files;
}

export const hasFiles = () => attached.length > 0;

export const isReading = () => numReading > 0;

/** What the model reads of a message: its files, then its text, so that a question about the same files is read fast. */
export function promptOf({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, ...(content.trim() || !parts.length ? [content] : [])].join("\n\n");
}

/** A file as an element that shows it. `onRemove`: where it can be taken away. */
export function fileChip(file, onRemove) {
  const count = file.text.length, size = count === 1 ? "1 character" : count < 1000 ? `${count} characters` : `${Math.round(count / 1000)}k characters`;
  const open = h("button", { type: "button", title: `Show ${file.name}`, onclick: () => showFile(file) }, h("span", {}, file.name), h("small", {}, size));
  return h("span", { class: "chip" }, open, onRemove && iconButton("close", `Remove ${file.name}`, onRemove));
}

function showFile({ name, text }) {
  $("file-name").textContent = name;
  $("file-text").textContent = text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}\n…` : text;
  $("file-dialog").showModal();
}

function draw() {
  const chips = attached.map((file) => fileChip(file, () => { attached = attached.filter((each) => each !== file); draw(); }));
  if (numReading) chips.push(h("span", { class: "quiet" }, "Reading…"));
  $("files").replaceChildren(...chips);
  $("files").hidden = !chips.length;
}

/** Read files and attach them; what cannot be read is said. */
export async function attach(files) {
  numReading += files.length;
  draw();
  for (const file of files) {
    try {
      const text = await readText(file);
      if (!text.trim()) throw new Error("There is no text in it.");
      attached.push({ name: file.name, text });
    } catch (error) {
      announce(`${file.name}: ${error.message}`, true);
    }
    numReading--;
    draw();
  }
  $("prompt").focus();
}

async function readText(file) {
  const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const most = isPdf ? MOST_PDF_BYTES : MOST_BYTES;
  if (file.size > most) throw new Error(`It has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${most >> 20} MiB are read.`);
  if (/^(image|audio|video)\//.test(file.type) && file.type !== "image/svg+xml") throw new Error(TEXT_ONLY);
  const data = await file.arrayBuffer();
  return isPdf ? readPdf(data) : decodeText(new Uint8Array(data));
}

function decodeText(bytes) {
  const marks = { "255,254": "utf-16le", "254,255": "utf-16be" };
  const encoding = marks[bytes.slice(0, 2).join()] ?? "utf-8";
  let text = "\0";
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    text = new TextDecoder("windows-1252").decode(bytes); // older files; others have bytes that no text has
    if (/[\x00-\x08\x0e-\x1f\x81\x8d\x8f\x90\x9d]/.test(text)) throw new Error(TEXT_ONLY);
  }
  if (text.includes("\0")) throw new Error(TEXT_ONLY);
  return text.replace(/\r\n?/g, "\n");
}

async function readPdf(data) {
  if (!libraries.includes("pdf")) throw new Error("This server's page lacks the library that reads PDFs.");
  const { getDocument } = await import("./vendor/pdf.js");
  const pdf = await getDocument({ data, isEvalSupported: false, disableFontFace: true, useSystemFonts: true }).promise
    .catch((error) => { throw new Error(error.name === "PasswordException" ? "It is locked with a password." : "It cannot be read as a PDF."); });
  const pages = [];
  for (let number = 1; number <= pdf.numPages; number++) {
    const { items } = await (await pdf.getPage(number)).getTextContent();
    pages.push(items.map((item) => (item.str ?? "") + (item.hasEOL ? "\n" : "")).join(""));
  }
  await pdf.loadingTask.destroy();
  const text = pages.map((page) => page.trim()).join("\n\n").trim();
  if (!text) throw new Error("It holds pictures of its pages and no text.");
  return text;
}

/** Bind the button, the paste and the drop. */
export function connectFiles() {
  const input = $("file-input"), prompt = $("prompt"), main = document.querySelector("main");
  input.addEventListener("change", () => { attach([...input.files]); input.value = ""; });
  prompt.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files], text = event.clipboardData.getData("text/plain");
    if (!files.length && text.length < LONG_PASTE) return;
    event.preventDefault();
    attach(text ? [new File([text], "pasted.txt", { type: "text/plain" })] : files);
  });
  const isFiles = (event) => event.dataTransfer?.types.includes("Files");
  let depth = 0; // of the elements that the drag is over
  const setOver = (isOver) => main.classList.toggle("dropping", isOver);
  document.addEventListener("dragenter", (event) => { if (isFiles(event)) setOver(++depth > 0); });
  document.addEventListener("dragleave", (event) => { if (isFiles(event)) setOver(--depth > 0); });
  document.addEventListener("dragover", (event) => { if (isFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault();
    depth = 0;
    setOver(false);
    attach([...event.dataTransfer.files]);
  });
}
