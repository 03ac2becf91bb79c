// The page: starts up, sends messages, shows the answer as it comes, and binds buttons and keys.

import { ApiError, chat, get, getKey, setKey } from "./api.js";
import { $, announce, download, h, iconButton } from "./dom.js";
import { MessageView, addTokens } from "./message.js";
import { Live, showMemory, showQueue } from "./panel.js";
import { connectSettings, dropSchema, requestFields, resetSettings, settingsProblem, showDefaults } from "./settings.js";
import { conversations, newConversation, preferences, removeConversation, saveConversation, savePreferences, titleOf } from "./store.js";

const IDEAS = ["Explain speculative decoding in three sentences.", "Write a Python function that merges two sorted lists.", "Find me a cheap Italian restaurant for tonight."];
const POLL_MS = 3000;
const live = new Live();
let current = newConversation();
let views = [];
let running = null; // the AbortController of the answer that is being written
let isReady = false;

// -- the conversation

function show(conversation) {
  running?.abort();
  current = conversation;
  $("s-system").value = current.system;
  drawMessages();
  live.begin();
  const last = current.messages.findLast((message) => message.timings);
  if (last) live.show(last.timings, last.runs);
  listConversations();
  toBottom();
}

function drawMessages() {
  views = current.messages.map((message, index) => new MessageView(message, index, actions));
  $("messages").replaceChildren(...views.map((view) => view.element));
  $("welcome").hidden = current.messages.length > 0;
}

function keep() {
  if (!saveConversation(current)) announce("This browser could not store the conversation: it lasts until the page is closed.");
  listConversations();
}

function listConversations() {
  $("conversations").replaceChildren(...conversations().map((each) => h("li", { class: each.id === current.id ? "current" : "" },
    h("button", { type: "button", "aria-current": each.id === current.id ? "true" : null, onclick: () => { show(each); closeDrawers(); } }, titleOf(each)),
    iconButton("save", "Export", () => download("conversation.json", each)),
    iconButton("trash", "Delete", async () => {
      if (!await confirmed(`Delete “${titleOf(each)}”?`)) return;
      if (each.id === current.id) show(newConversation());
      removeConversation(each.id);
      listConversations();
    }))));
}

const actions = {
  copy: (text) => navigator.clipboard?.writeText(text).then(() => announce("Copied")),
  again(index) {
    if (running) return;
    current.messages.length = current.messages[index].role === "user" ? index + 1 : index;
    answer();
  },
  edit(index, text) {
    if (running) return;
    current.messages.length = index;
    current.messages.push({ role: "user", content: text });
    answer();
  },
  dropSchema(index) {
    dropSchema();
    actions.again(index);
  },
};

async function answer() {
  const problem = settingsProblem();
  const sent = current.messages.map(({ role, content }) => ({ role, content }));
  if (current.system.trim()) sent.unshift({ role: "system", content: current.system });
  const conversation = current, message = { role: "assistant", content: "", runs: [] };
  current.messages.push(message);
  drawMessages();
  keep();
  toBottom();
  if (problem) {
    message.error = { message: problem };
    views.at(-1).draw(false);
    return;
  }
  const view = views.at(-1), own = running = new AbortController();
  setRunning(true);
  live.begin();
  view.draw(true);
  try {
    for await (const chunk of chat({ messages: sent, ...requestFields() }, own.signal)) take(chunk, message, view);
    message.ending ??= "stop";
    announce("The answer is complete.");
  } catch (error) {
    if (own.signal.aborted) message.ending = "stopped";
    else {
      message.error = { message: error.message, param: error.param };
      if (error.status === 401) askKey("The key is missing or wrong.");
      if (!(error instanceof ApiError)) console.error(error);
    }
  }
  if (running === own) { running = null; setRunning(false); }
  view.draw(false);
  if (current === conversation) { live.show(message.timings ?? null, message.runs); keep(); follow(); }
  else if (conversations().some((each) => each.id === conversation.id)) saveConversation(conversation);
}

let frame = 0;
function take(chunk, message, view) {
  const choice = chunk.choices[0];
  if (choice?.delta.content) {
    message.content += choice.delta.content;
    addTokens(message, chunk.tokens ?? [{ text: choice.delta.content, drafter: null }]);
  }
  if (choice?.finish_reason === "length") message.ending = "length";
  if (chunk.timings) message.timings = chunk.timings;
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    view.draw(view.element.classList.contains("running"));
    if (view.element.isConnected && message.timings) live.update(message.timings, message.runs);
    follow();
  });
}

function setRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  $("messages").setAttribute("aria-busy", String(isRunning)); // a screen reader reads whole answers
  document.body.classList.toggle("busy", isRunning);
}

// -- scrolling: stays at the end unless the reader has scrolled up

let isAtEnd = true;
const scroll = $("scroll");
scroll.addEventListener("scroll", () => {
  isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
  $("latest").hidden = isAtEnd;
});
function toBottom() { scroll.scrollTop = scroll.scrollHeight; isAtEnd = true; $("latest").hidden = true; }
function follow() { if (isAtEnd) toBottom(); }

// -- the message field

const prompt = $("prompt");
function fit() { prompt.style.height = "auto"; prompt.style.height = `${Math.min(prompt.scrollHeight, 240)}px`; }
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
  if (event.key === "ArrowUp" && !prompt.value && !running) {
    const index = current.messages.findLastIndex((message) => message.role === "user");
    if (index >= 0) { event.preventDefault(); views[index].edit(); }
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!prompt.value.trim() || running || !isReady) return;
  current.messages.push({ role: "user", content: prompt.value });
  prompt.value = "";
  fit();
  answer();
});
$("s-system").addEventListener("input", (event) => {
  current.system = event.target.value;
  if (current.messages.length) saveConversation(current);
});

// -- drawers and dialogs

const wide = matchMedia("(min-width: 70rem)");
function drawPanel() {
  document.body.classList.toggle("with-panel", preferences.panel && wide.matches);
  $("panel").classList.toggle("open", !wide.matches && drawer === "panel");
  $("side").classList.toggle("open", drawer === "side");
  $("shade").classList.toggle("open", drawer !== "");
  $("panel-button").setAttribute("aria-expanded", String(wide.matches ? preferences.panel : drawer === "panel"));
  document.querySelector("[data-do=side]").setAttribute("aria-expanded", String(drawer === "side"));
}
let drawer = "";
function openDrawer(name) {
  drawer = drawer === name ? "" : name;
  drawPanel();
  if (drawer) $(drawer).querySelector("button, input, textarea")?.focus();
}
function closeDrawers() { drawer = ""; drawPanel(); }
function togglePanel() {
  if (!wide.matches) { openDrawer("panel"); return; }
  preferences.panel = !preferences.panel;
  savePreferences();
  drawPanel();
}
wide.addEventListener("change", closeDrawers);

function confirmed(question) {
  $("ask-text").textContent = question;
  $("ask-dialog").showModal();
  return new Promise((resolve) => {
    $("ask-dialog").addEventListener("close", () => resolve($("ask-dialog").returnValue === "yes"), { once: true });
    $("ask-dialog").returnValue = "";
  });
}

function askKey(problem = "") {
  $("key-error").textContent = problem;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}
$("key-form").addEventListener("submit", () => { setKey($("key").value.trim()); $("key").value = ""; start(); });

function drawMarks() {
  document.body.classList.toggle("marks", preferences.marks);
  $("marks").setAttribute("aria-pressed", String(preferences.marks));
}

const DO = {
  new() { show(newConversation()); closeDrawers(); prompt.focus(); },
  side: () => openDrawer("side"),
  panel: togglePanel,
  "close-drawers": closeDrawers,
  stop: () => running?.abort(),
  latest: toBottom,
  help: () => $("help-dialog").showModal(),
  reset: resetSettings,
  marks() { preferences.marks = !preferences.marks; savePreferences(); drawMarks(); },
  theme() {
    const isDark = preferences.theme ? preferences.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = preferences.theme = isDark ? "light" : "dark";
    savePreferences();
  },
  "export-all": () => download("conversations.json", conversations()),
  async "delete-all"() {
    if (!await confirmed("Delete all conversations of this browser?")) return;
    show(newConversation());
    conversations().forEach((each) => removeConversation(each.id));
    listConversations();
  },
};
document.addEventListener("click", (event) => DO[event.target.closest("[data-do]")?.dataset.do]?.());

const ALT = { KeyN: DO.new, KeyD: DO.marks, KeyP: DO.panel, KeyR: () => current.messages.length && actions.again(current.messages.length - 1) };
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.altKey && !event.ctrlKey && !event.metaKey && ALT[event.code]) { event.preventDefault(); ALT[event.code](); }
  else if (event.key === "Escape") { if (drawer) closeDrawers(); else DO.stop(); }
  else if (event.key === "?" && !/^(INPUT|TEXTAREA)$/.test(event.target.tagName)) DO.help();
});

// -- starting, and whether the server is there

function setState(name, text) {
  $("state").dataset.state = name;
  $("state").setAttribute("aria-label", text);
  $("state").title = text;
}

async function start() {
  let properties;
  try {
    properties = await get("/props");
  } catch (error) {
    isReady = false;
    if (error.status === 401) {
      setState("off", "needs an API key");
      askKey(getKey() ? "The key is wrong." : "");
      return;
    }
    setState(error.status === 503 ? "loading" : "off", error.status === 503 ? "loading the model" : "the server does not answer");
    $("welcome-text").textContent = error.status === 503 ? "The model is being loaded." : error.message;
    setTimeout(start, 700);
    return;
  }
  isReady = true;
  setState("ready", "ready");
  $("model").textContent = document.title = properties.model_alias;
  $("welcome-text").textContent = `${properties.model_alias} runs on this machine: ${properties.engine} on ${properties.device}, drafter ${properties.drafter}.`;
  showDefaults(properties.default_generation_settings.params);
  showMemory(properties.memory);
}

async function poll() {
  if (!isReady || document.hidden) return;
  try {
    showQueue(await get("/health"));
    if (!running && preferences.panel) showMemory((await get("/props")).memory);
  } catch (error) {
    isReady = false;
    if (!running) start();
  }
}

$("ideas").append(...IDEAS.map((text) => h("button", { type: "button", onclick: () => { prompt.value = text; fit(); prompt.focus(); } }, text)));
connectSettings();
drawMarks();
drawPanel();
show(newConversation());
start();
setInterval(poll, POLL_MS);
prompt.focus();
