// Conversations and preferences in localStorage. They never leave the browser, except as prompts to this server.

const PREFERENCES = "edgespec.preferences";
const PREFIX = "edgespec.conversation.";
const memory = new Map(); // what could not be stored: storage is off or full

function read(key) {
  try {
    return memory.get(key) ?? JSON.parse(localStorage.getItem(key)) ?? null;
  } catch {
    return null;
  }
}

/** Whether it could be stored; what could not lives until the page is closed. */
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    memory.delete(key);
    return true;
  } catch {
    memory.set(key, value);
    return false;
  }
}

export const preferences = { theme: "", keepMarks: false, panel: true, model: "", request: {}, ...read(PREFERENCES) };

export const savePreferences = () => write(PREFERENCES, preferences);

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), system: "", schema: "", messages: [], updated: Date.now() };
}

/** The first words of a conversation. */
export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content.trim() ?? "";
  return first.split("\n")[0].slice(0, 60) || "New conversation";
}

export function saveConversation(conversation) {
  conversation.updated = Date.now();
  return write(PREFIX + conversation.id, conversation);
}

function isConversation(value) {
  return typeof value?.id === "string" && Array.isArray(value.messages)
    && value.messages.every((message) => typeof message?.content === "string" && typeof message.role === "string");
}

/** All conversations, the latest first. */
export function conversations() {
  const keys = new Set([...memory.keys()].filter((key) => key.startsWith(PREFIX)));
  try {
    for (let i = 0; i < localStorage.length; i++) if (localStorage.key(i).startsWith(PREFIX)) keys.add(localStorage.key(i));
  } catch { /* storage is off */ }
  return [...keys].map(read).filter(isConversation).sort((a, b) => b.updated - a.updated);
}

export function removeConversation(id) {
  memory.delete(PREFIX + id);
  try { localStorage.removeItem(PREFIX + id); } catch { /* storage is off */ }
}
