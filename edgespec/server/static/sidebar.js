// The list of conversations: search, rename, export, import, delete.

import { $, announce, download, h, iconButton } from "./dom.js";
import { closeDrawers, confirmed } from "./shell.js";
import { conversations, putConversation, removeConversation, saveConversation } from "./store.js";
import { readConversation, titleOf } from "./thread.js";

const search = $("search");
let shownId = ""; // of the conversation that is open
let answering = new Map(); // has the ids of those whose answer is being written
let renamedId = ""; // of the one whose name is a field
let actions = null;

/** `actions`: open(conversation), and leave(id): one is about to be deleted. */
export function connectSidebar(given) {
  actions = given;
  search.addEventListener("input", listConversations);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && search.value) {
      event.stopPropagation();
      search.value = "";
      listConversations();
    } else if (event.key === "Enter") $("conversations").querySelector("button")?.click();
  });
  $("import").addEventListener("change", async () => {
    await importFiles([...$("import").files]);
    $("import").value = "";
  });
}

/** Draw the list anew. `id`: the conversation that is open now; `running` has the ids of those that are answered. */
export function showList(id = shownId, running = answering) {
  shownId = id;
  answering = running;
  if (!renamedId) listConversations();
}

function holds(conversation, words) {
  if (!words.length) return true;
  const texts = conversation.messages.flatMap(({ content, files = [] }) => [content, ...files.map((file) => file.name)]);
  const all = [titleOf(conversation), ...texts].join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

function listConversations() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = conversations().filter((each) => holds(each, words));
  const nothing = words.length && !found.length && h("li", { class: "quiet" }, "Nothing found.");
  $("conversations").replaceChildren(...found.map(entry), ...(nothing ? [nothing] : []));
}

function entry(conversation) {
  const isShown = conversation.id === shownId, title = titleOf(conversation);
  if (conversation.id === renamedId) return h("li", {}, nameField(conversation));
  const open = () => { if (!isShown) actions.open(conversation); closeDrawers(); };
  const rename = () => { renamedId = conversation.id; listConversations(); $("conversations").querySelector("input").select(); };
  const opening = { type: "button", "aria-current": isShown && "true", title, onclick: open, ondblclick: rename };
  return h("li", { class: `${isShown ? "current" : ""} ${answering.has(conversation.id) ? "answering" : ""}` },
    h("button", opening, title),
    iconButton("edit", "Rename", rename),
    iconButton("save", "Export", () => download(`${fileName(title)}.json`, conversation)),
    iconButton("trash", "Delete", () => remove(conversation)));
}

/** A title as the name of a file. */
const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation";

function nameField(conversation) {
  const field = h("input", { "aria-label": "Name of the conversation", value: titleOf(conversation), maxlength: "200" });
  const leave = (keeps) => {
    if (renamedId !== conversation.id) return;
    renamedId = "";
    if (keeps && field.value.trim() !== titleOf(conversation)) {
      conversation.title = field.value.trim();
      saveConversation(conversation);
    }
    listConversations();
  };
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") leave(true);
    if (event.key === "Escape") leave(false);
  });
  field.addEventListener("blur", () => leave(true));
  return field;
}

async function remove(conversation) {
  if (!await confirmed(`Delete “${titleOf(conversation)}”?`)) return;
  actions.leave(conversation.id);
  removeConversation(conversation.id);
  listConversations();
}

export async function removeAll() {
  if (!await confirmed("Delete all conversations of this browser?")) return;
  for (const { id } of conversations()) {
    actions.leave(id);
    removeConversation(id);
  }
  listConversations();
}

/** Add the conversations of JSON files: exported here or by llama.cpp's page, or a list of messages. */
export async function importFiles(files) {
  const found = [];
  for (const file of files) {
    const value = await file.text().then(JSON.parse).catch(() => null);
    const isOne = Array.isArray(value?.messages) || value?.[0]?.role;
    const values = isOne ? [value.messages ? value : { messages: value }] : Array.isArray(value) ? value : [];
    found.push(...values.map(readConversation).filter(Boolean));
  }
  found.forEach(putConversation);
  announce(found.length ? `Imported: ${found.length}` : "No conversation was found in this file.", !found.length);
  listConversations();
  if (found.length === 1) actions.open(found[0]);
}
