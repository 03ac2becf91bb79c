// Conversations in the browser's IndexedDB, preferences in localStorage. They leave the browser only as prompts to this
// server. All conversations are held in memory too, so that reading takes no waiting.

import { readConversation } from "./thread.js";

const PREFERENCES = "edgespec.preferences";
const NAME = "edgespec", TABLE = "conversations";

/** @type {Map<string, import("./thread.js").Conversation>} */
const held = new Map();
const channel = new BroadcastChannel(NAME); // to the other pages of this browser: what has changed
let database = null; // null: nothing can be stored, and conversations last until the page is closed

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const table = (mode) => database.transaction(TABLE, mode).objectStore(TABLE);

/** Read what is stored. `onChange(id)`: another page has changed a conversation. */
export async function openStore(onChange) {
  try {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    database = await done(opening);
    for (const value of await done(table("readonly").getAll())) hold(value);
  } catch (error) {
    console.warn("conversations cannot be stored:", error);
  }
  channel.addEventListener("message", async ({ data: id }) => {
    if (!database) return;
    const value = await done(table("readonly").get(id)).catch(() => undefined);
    if (value) hold(value);
    else held.delete(id);
    onChange(id);
  });
}

function hold(value) {
  const conversation = readConversation(value);
  if (conversation) held.set(conversation.id, conversation);
}

function parsed(json) {
  try {
    return JSON.parse(json);
  } catch {
    return null;
  }
}

/** Keep a conversation; whether it is stored. */
export function saveConversation(conversation) {
  conversation.updated = Date.now();
  return putConversation(conversation);
}

/** Keep a conversation with the time of its last change as it is; whether it is stored. */
export async function putConversation(conversation) {
  held.set(conversation.id, conversation);
  try {
    await done(table("readwrite").put(conversation));
    channel.postMessage(conversation.id);
    return true;
  } catch {
    return false;
  }
}

export async function removeConversation(id) {
  held.delete(id);
  try {
    await done(table("readwrite").delete(id));
    channel.postMessage(id);
  } catch { /* it was never stored */ }
}

/** All conversations, the latest first. */
export const conversations = () => [...held.values()].sort((a, b) => b.updated - a.updated);

export const findConversation = (id) => held.get(id);

// -- preferences

let kept = {};
try {
  kept = parsed(localStorage.getItem(PREFERENCES));
} catch { /* storage is off */ }

export const preferences = { theme: "", keepMarks: false, panel: true, model: "", thinking: true, request: {}, ...kept };

export function savePreferences() {
  try { localStorage.setItem(PREFERENCES, JSON.stringify(preferences)); } catch { /* they last until the page is closed */ }
}
