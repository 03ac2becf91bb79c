// A conversation: its messages as a tree, of which one path is shown. Answering again and editing add a branch.
//
// `messages` are in the order of their making; `parent` is the place of the one before, -1 for a first one. `head` is
// the place of the last one that is shown, -1 where there is none.

/**
 * @typedef {{ name: string, text: string }} TextFile
 * @typedef {{ id: string, name: string, arguments: string }} Call
 * @typedef {{
 *   role: "user" | "assistant" | "tool", content: string, parent: number, runs?: [number, string | null][],
 *   reasoning?: string, thoughtMs?: number, files?: TextFile[], calls?: Call[], callId?: string, timings?: Object<string, any>,
 *   ending?: string, error?: { message: string, param?: string, isLost?: boolean }, hasResumed?: boolean,
 * }} Message
 * @typedef {{
 *   id: string, title: string, system: string, schema: string, tools: string, messages: Message[], head: number,
 *   updated: number,
 * }} Conversation
 */

const makeId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;

/** @returns {Conversation} */
export function newConversation() {
  return { id: makeId(), title: "", system: "", schema: "", tools: "", messages: [], head: -1, updated: Date.now() };
}

/** The name of a conversation, else its first words. */
export function titleOf({ title, messages }) {
  const first = messages.find((message) => message.role === "user");
  const words = first?.content.trim() || first?.files?.[0]?.name || "";
  return title || words.split("\n")[0].slice(0, 60) || "New conversation";
}

/** The messages that are shown, from the first one to the head. */
export function shownMessages({ messages, head }) {
  const found = [];
  for (let place = head; place >= 0; place = messages[place].parent) found.push(messages[place]);
  return found.reverse();
}

/** Add a message behind `parent`, a place or a message, and show it. */
export function addMessage(conversation, message, parent = conversation.head) {
  const place = typeof parent === "number" ? parent : conversation.messages.indexOf(parent);
  conversation.messages.push(Object.assign(message, { parent: place }));
  conversation.head = conversation.messages.length - 1;
  return message;
}

/** The versions of a message, oldest first: those with its parent. */
export const versionsOf = ({ messages }, message) => messages.filter((each) => each.parent === message.parent);

/** Show `message` and what last followed it. */
export function showVersion(conversation, message) {
  const { messages } = conversation;
  let head = messages.indexOf(message);
  for (let next = head; next >= 0; next = messages.findLastIndex((each) => each.parent === head)) head = next;
  conversation.head = head;
}

// -- conversations from outside: what the browser holds in another form, a file of ours or of another program

const ROLES = ["user", "assistant", "tool"];
const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);

/** The conversation in a value of any form; null where it holds none. @returns {Conversation | null} */
export function readConversation(value) {
  if (!Array.isArray(value?.messages)) return null;
  const given = value.conv ? fromLlamaCpp(value) : value;
  const messages = given.messages.map((message, place) => readMessage(message, place));
  if (messages.includes(null)) return null;
  const head = Number.isInteger(given.head) && given.head < messages.length ? Math.max(given.head, -1) : messages.length - 1;
  const fields = { title: text(given.title), system: text(given.system), schema: text(given.schema), tools: text(given.tools) };
  const updated = Number.isFinite(given.updated) ? given.updated : Date.now();
  return { ...newConversation(), ...fields, id: text(given.id) || makeId(), messages, head, updated };
}

function readMessage(message, place) {
  if (!ROLES.includes(message?.role) || typeof message.content !== "string") return null;
  const parent = message.parent ?? place - 1;
  if (!Number.isInteger(parent) || parent < -1 || parent >= place) return null;
  const found = { role: message.role, content: message.content, parent };
  for (const name of ["reasoning", "callId", "ending"]) if (text(message[name])) found[name] = message[name];
  if (message.role === "assistant") {
    const isRun = (run) => Array.isArray(run) && run[0] > 0 && (run[1] === null || typeof run[1] === "string");
    found.runs = list(message.runs).filter(isRun);
  }
  const files = list(message.files).filter((file) => text(file?.name) && typeof file.text === "string");
  if (files.length) found.files = files.map((file) => ({ name: file.name, text: file.text }));
  const calls = list(message.calls).filter((call) => text(call?.name));
  if (calls.length) found.calls = calls.map((call) => ({ id: text(call.id), name: call.name, arguments: text(call.arguments) }));
  if (Number.isFinite(message.thoughtMs)) found.thoughtMs = message.thoughtMs;
  const figures = Object.entries(message.timings ?? {}).filter(([, value]) => Number.isFinite(value));
  if (Number.isFinite(message.timings?.predicted_per_second)) found.timings = Object.fromEntries(figures);
  const { message: problem, param, isLost } = message.error ?? {};
  if (text(problem)) found.error = { message: problem, param: text(param), isLost: isLost === true };
  return found;
}

/** What llama.cpp's page exports: messages that name their parents, below one of the type "root". */
function fromLlamaCpp({ conv, messages }) {
  const kept = messages.filter((each) => ROLES.includes(each?.role));
  const placeOf = new Map(kept.map((each, place) => [each.id, place]));
  const found = kept.map((each) => ({
    role: each.role, content: text(each.content), reasoning: text(each.reasoningContent ?? each.thinking),
    files: list(each.extra).map((file) => ({ name: file?.name, text: file?.content })), parent: placeOf.get(each.parent) ?? -1,
  }));
  const system = text(messages.find((each) => each?.role === "system")?.content);
  return { title: text(conv.name), system, messages: found, head: placeOf.get(conv.currNode) };
}
