// The current conversation: sends messages, shows the answer as it comes, keeps everything in the browser. Answers of
// other conversations go on meanwhile.

import { ApiError, chat } from "./api.js";
import { $, announce, copyText } from "./dom.js";
import { promptOf, takeFiles } from "./files.js";
import { MessageView, addTokens, resetColours } from "./message.js";
import { modelField } from "./models.js";
import { Live, showContext } from "./panel.js";
import { requestFields, settingsProblem, showOwn } from "./settings.js";
import { askKey, follow, toBottom } from "./shell.js";
import { showList } from "./sidebar.js";
import { findConversation, saveConversation } from "./store.js";
import { addMessage, newConversation, showVersion, shownMessages, versionsOf } from "./thread.js";

const SAVED_EACH_MS = 2000; // while an answer is written
const DRAWN_EACH_MS = 40, MOST_DRAWING = 0.2; // share of the time: the processor is the model's
const ADDRESS = "#/chat/"; // and the id of a conversation
const live = new Live();
let current = newConversation();
let views = [];
const running = new Map(); // id of a conversation -> its answer that is being written: {conversation, message, progress, abort}
let drawing = 0; // the timer of the next one
let pauseMs = DRAWN_EACH_MS;

export const isRunning = () => running.has(current.id);

export const stop = () => running.get(current.id)?.abort();

/** Show a stored conversation, or a new one, under its address. */
export function show(conversation = newConversation()) {
  current = running.get(conversation.id)?.conversation ?? conversation;
  const address = current.messages.length ? ADDRESS + current.id : location.pathname;
  if (address !== (location.hash || location.pathname)) history.pushState(null, "", address);
  $("s-system").value = current.system;
  showOwn(current);
  resetColours();
  drawMessages();
  live.begin();
  const last = shownMessages(current).findLast((message) => message.timings);
  if (last) live.show(last.timings, last.runs);
  showContext(last?.timings);
  drawRunning();
  toBottom();
}

/** Show the conversation that the address names. */
export function showAddressed() {
  const id = location.hash.startsWith(ADDRESS) ? location.hash.slice(ADDRESS.length) : "";
  if (id === current.id) return;
  const found = findConversation(id);
  if (id && !found) announce("This conversation is not in this browser.", true);
  if (!found) history.replaceState(null, "", location.pathname);
  show(found);
}

/** A conversation is about to be deleted. */
export function leave(id) {
  running.get(id)?.abort();
  if (id === current.id) show();
}

/** Another page of this browser has changed what is stored of a conversation. */
export function refresh(id) {
  showList();
  if (id !== current.id || isRunning() || !current.messages.length || $("messages").querySelector("textarea")) return;
  show(findConversation(id));
}

export function send(text) {
  const files = takeFiles();
  addMessage(current, { role: "user", content: text, ...(files.length && { files }) });
  answer();
}

/** Make the last message of the user a field. */
export function editLast() {
  const view = views.findLast(({ message }) => message.role === "user");
  if (view && !isRunning()) view.edit();
  return Boolean(view);
}

export function answerAgain() {
  const last = views.findLast(({ message }) => message.role !== "tool")?.message;
  if (last) actions.again(last);
}

/** The answer that a lost connection has cut goes on, once. */
export function resume() {
  const last = views.at(-1)?.message;
  if (!last?.error?.isLost || last.hasResumed || isRunning()) return;
  last.hasResumed = true;
  if (last.content) actions.goOn(last);
  else answer(last);
}

/** Change the system prompt, the schema or the tools of the conversation. */
export function change(fields) {
  Object.assign(current, fields);
  showOwn(current);
  if (current.messages.length) saveConversation(current);
}

const actions = {
  copy: copyText,
  again(message) {
    if (isRunning()) return;
    current.head = message.role === "user" ? current.messages.indexOf(message) : message.parent;
    answer();
  },
  goOn(message) {
    if (!isRunning()) answer(message);
  },
  edit(message, content) {
    if (isRunning()) return;
    if (message.role === "assistant") {
      addMessage(current, { role: "assistant", content, runs: [] }, message.parent);
      drawMessages();
      keep(current);
      return;
    }
    addMessage(current, { role: "user", content, ...(message.files && { files: message.files }) }, message.parent);
    answer();
  },
  dropSchema(message) {
    change({ schema: "" });
    actions.again(message);
  },
  version(message) {
    if (isRunning()) return;
    showVersion(current, message);
    drawMessages();
    keep(current);
  },
  results(message, texts) {
    if (isRunning()) return;
    message.calls.forEach(({ id }, index) => addMessage(current, { role: "tool", content: texts[index], callId: id }));
    answer();
  },
};

function drawMessages() {
  const shown = shownMessages(current);
  views = shown.map((message, index) => {
    const place = { versions: versionsOf(current, message), isLast: index === shown.length - 1 };
    return new MessageView(message, place, actions);
  });
  $("messages").replaceChildren(...views.map((view) => view.element));
  $("welcome").hidden = shown.length > 0;
}

const viewOf = (message) => views.find((view) => view.message === message);

/** Draw the part of the answer of this conversation that is there, and what depends on whether there is one. */
function drawRunning() {
  const answering = running.get(current.id), isOn = Boolean(answering);
  $("send").hidden = isOn;
  $("stop").hidden = !isOn;
  $("messages").setAttribute("aria-busy", String(isOn)); // a screen reader reads whole answers
  document.body.classList.toggle("busy", isOn);
  showList(current.id, running);
  const view = viewOf(answering?.message);
  if (!view) return;
  view.progress = answering.progress;
  view.draw(true);
}

async function keep(conversation) {
  const isStored = await saveConversation(conversation);
  if (!isStored) announce("The browser could not store this conversation: it lasts until the page is closed.", true);
  showList();
}

/** A message as the server takes it. */
function sentMessage(message) {
  const { role, content, calls, callId } = message;
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (role === "user" || !calls) return { role, content: role === "user" ? promptOf(message) : content };
  const made = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return { role, content, tool_calls: made };
}

/** Answer the last message; an answer that has begun, if one is given, goes on. */
async function answer(begun) {
  const conversation = current, message = begun ?? addMessage(current, { role: "assistant", content: "", runs: [] });
  const before = shownMessages(current).filter((each) => each !== message || each.content);
  const sent = before.map(sentMessage);
  if (current.system.trim()) sent.unshift({ role: "system", content: current.system });
  for (const name of ["ending", "error", "calls"]) delete message[name];
  if (!message.content) delete message.reasoning;
  if (!location.hash.endsWith(conversation.id)) history.pushState(null, "", ADDRESS + conversation.id);
  drawMessages();
  keep(conversation);
  toBottom();
  const problem = settingsProblem();
  if (problem) message.error = { message: problem };
  else await receive({ messages: sent, ...modelField(), ...requestFields(conversation) }, conversation, message);
  viewOf(message)?.draw(false);
  if (current === conversation) {
    live.show(message.timings ?? null, message.runs);
    showContext(message.timings);
    follow();
  }
  if (current === conversation || findConversation(conversation.id)) await keep(conversation);
  if (message.error?.isLost) document.dispatchEvent(new Event("lost"));
}

/** Fill `message` with the answer to `request`, to its end or until it is stopped. */
async function receive(request, conversation, message) {
  const controller = new AbortController(), { signal } = controller;
  const answering = { conversation, message, progress: null, abort: () => controller.abort() };
  let savedAt = performance.now();
  running.set(conversation.id, answering);
  live.begin();
  drawRunning();
  try {
    for await (const chunk of chat(request, signal)) {
      take(chunk, answering);
      if (performance.now() - savedAt < SAVED_EACH_MS) continue;
      savedAt = performance.now();
      if (findConversation(conversation.id)) saveConversation(conversation); // else it was deleted meanwhile
    }
    message.ending ??= "stop";
    announce("The answer is complete.");
  } catch (error) {
    if (signal.aborted) message.ending = "stopped";
    else message.error = { message: error.message, param: error.param, isLost: error.status === 0 };
    if (error.status === 401) askKey("The key is missing or wrong.");
    if (!signal.aborted && !(error instanceof ApiError)) console.error(error);
  }
  running.delete(conversation.id);
  drawRunning();
}

function take(chunk, answering) {
  const { message } = answering;
  const { delta = {}, finish_reason: reason } = chunk.choices?.[0] ?? {};
  if (chunk.prompt_progress) answering.progress = chunk.prompt_progress;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  if (delta.content) {
    if (message.reasoning && !message.content && chunk.timings) message.thoughtMs = chunk.timings.predicted_ms;
    message.content += delta.content;
    addTokens(message, chunk.tokens ?? [{ text: delta.content, drafter: null }]);
  }
  for (const call of delta.tool_calls ?? []) {
    const known = (message.calls ??= [])[call.index] ??= { id: "", name: "", arguments: "" };
    known.id += call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (reason === "length") message.ending = "length";
  if (chunk.timings) message.timings = chunk.timings;
  drawing ||= setTimeout(drawGrowing, pauseMs);
}

function drawGrowing() {
  drawing = 0;
  const message = running.get(current.id)?.message;
  if (!message) return; // `answer` has drawn the end, or another conversation is shown
  const began = performance.now(), view = viewOf(message);
  view.progress = running.get(current.id).progress;
  view.draw(true);
  if (message.timings) live.update(message.timings, message.runs);
  showContext(message.timings);
  follow();
  pauseMs = Math.max(DRAWN_EACH_MS, (performance.now() - began) / MOST_DRAWING);
}
