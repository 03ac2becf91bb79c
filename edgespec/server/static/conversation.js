// The current conversation: sends messages, shows the answer as it comes, keeps everything in the browser.

import { ApiError, chat } from "./api.js";
import { $, announce, copyText, download, h, iconButton } from "./dom.js";
import { MessageView, addTokens, resetColours } from "./message.js";
import { modelField } from "./models.js";
import { Live } from "./panel.js";
import { requestFields, settingsProblem, showSchema } from "./settings.js";
import { askKey, closeDrawers, confirmed, follow, toBottom } from "./shell.js";
import { conversations, newConversation, removeConversation, saveConversation, titleOf } from "./store.js";

const live = new Live();
let current = newConversation();
let views = [];
let running = null; // the AbortController of the answer that is being written
let frame = 0; // of the next drawing

export const isRunning = () => running !== null;

export const stop = () => running?.abort();

/** Show a stored conversation, or a new one. */
export function show(conversation = newConversation()) {
  stop();
  current = conversation;
  $("s-system").value = current.system;
  showSchema(current.schema);
  resetColours();
  drawMessages();
  live.begin();
  const last = current.messages.findLast((message) => message.timings);
  if (last) live.show(last.timings, last.runs);
  listConversations();
  toBottom();
}

/** Another page of this browser has changed what is stored. */
export function refresh() {
  listConversations();
  if (running || !current.messages.length || $("messages").querySelector("textarea")) return;
  const stored = conversations().find((each) => each.id === current.id);
  if (stored?.updated !== current.updated) show(stored);
}

export function send(text) {
  current.messages.push({ role: "user", content: text });
  answer();
}

/** Make the last message of the user a field. */
export function editLast() {
  const index = current.messages.findLastIndex((message) => message.role === "user");
  if (index >= 0 && !running) views[index].edit();
  return index >= 0;
}

export function answerAgain() {
  if (current.messages.length) actions.again(current.messages.length - 1);
}

/** Change the system prompt or the schema of the conversation. */
export function change(fields) {
  Object.assign(current, fields);
  showSchema(current.schema);
  if (current.messages.length) saveConversation(current);
}

export async function removeAll() {
  if (!await confirmed("Delete all conversations of this browser?")) return;
  show();
  conversations().forEach((each) => removeConversation(each.id));
  listConversations();
}

const actions = {
  copy: copyText,
  again(index) {
    if (running) return;
    current.messages.length = current.messages[index].role === "user" ? index + 1 : index;
    answer();
  },
  goOn(index) {
    if (running) return;
    current.messages.length = index + 1;
    answer(current.messages[index]);
  },
  edit(index, text) {
    if (running) return;
    current.messages.length = index;
    send(text);
  },
  dropSchema(index) {
    change({ schema: "" });
    actions.again(index);
  },
};

function drawMessages() {
  views = current.messages.map((message, index) => new MessageView(message, index, actions));
  $("messages").replaceChildren(...views.map((view) => view.element));
  $("welcome").hidden = current.messages.length > 0;
}

function listConversations() {
  $("conversations").replaceChildren(...conversations().map((each) => {
    const isCurrent = each.id === current.id;
    const open = () => { if (each.id !== current.id) show(each); closeDrawers(); };
    const remove = async () => {
      if (!await confirmed(`Delete “${titleOf(each)}”?`)) return;
      if (each.id === current.id) show();
      removeConversation(each.id);
      listConversations();
    };
    return h("li", { class: isCurrent ? "current" : "" },
      h("button", { type: "button", "aria-current": isCurrent && "true", onclick: open }, titleOf(each)),
      iconButton("save", "Export", () => download("conversation.json", each)),
      iconButton("trash", "Delete", remove));
  }));
}

function keep(conversation) {
  if (!saveConversation(conversation)) announce("The browser could not store this conversation: it lasts until the page is closed.");
  listConversations();
}

/** Answer the last message; an answer that has begun, if one is given, goes on. */
async function answer(begun) {
  const sent = current.messages.map(({ role, content }) => ({ role, content }));
  if (current.system.trim()) sent.unshift({ role: "system", content: current.system });
  const conversation = current, message = begun ?? { role: "assistant", content: "", runs: [] };
  if (!begun) current.messages.push(message);
  delete message.ending;
  delete message.error;
  drawMessages();
  keep(conversation);
  toBottom();
  const view = views.at(-1), problem = settingsProblem();
  if (problem) message.error = { message: problem };
  else await receive({ messages: sent, ...modelField(), ...requestFields(conversation.schema) }, message, view);
  view.draw(false);
  if (current === conversation) {
    live.show(message.timings ?? null, message.runs);
    follow();
  }
  if (current === conversation || conversations().some((each) => each.id === conversation.id)) keep(conversation);
}

/** Fill `message` with the answer to `request`, to its end or until it is stopped. */
async function receive(request, message, view) {
  const own = running = new AbortController();
  setRunning(true);
  live.begin();
  view.draw(true);
  try {
    for await (const chunk of chat(request, own.signal)) take(chunk, message, view);
    message.ending ??= "stop";
    announce("The answer is complete.");
  } catch (error) {
    if (own.signal.aborted) message.ending = "stopped";
    else message.error = { message: error.message, param: error.param };
    if (error.status === 401) askKey("The key is missing or wrong.");
    if (!own.signal.aborted && !(error instanceof ApiError)) console.error(error);
  }
  if (running === own) {
    running = null;
    setRunning(false);
  }
}

function take(chunk, message, view) {
  const choice = chunk.choices?.[0];
  if (choice?.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
  if (choice?.delta?.content) {
    message.content += choice.delta.content;
    addTokens(message, chunk.tokens ?? [{ text: choice.delta.content, drafter: null }]);
  }
  if (choice?.finish_reason === "length") message.ending = "length";
  if (chunk.timings) message.timings = chunk.timings;
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!running || !view.element.isConnected) return; // `answer` has drawn the end, or another conversation is shown
    view.draw(true);
    if (message.timings) live.update(message.timings, message.runs);
    follow();
  });
}

function setRunning(isOn) {
  $("send").hidden = isOn;
  $("stop").hidden = !isOn;
  $("messages").setAttribute("aria-busy", String(isOn)); // a screen reader reads whole answers
  document.body.classList.toggle("busy", isOn);
}
