// Starts the page and binds its buttons, keys and fields.

import { get, getKey, setKey } from "./api.js";
import { answerAgain, change, editLast, isRunning, leave, refresh, resume, send, show, showAddressed, stop } from "./conversation.js";
import { $, download, h } from "./dom.js";
import { connectFiles, hasFiles, isReading } from "./files.js";
import { connectModels, propertiesPath, showModels } from "./models.js";
import { setContextLength, showMemory, showQueue } from "./panel.js";
import { connectSettings, openOwn, resetSettings, showDefaults, showThinking, toggleThinking } from "./settings.js";
import { askKey, closeDrawers, openPanel, openSide, toBottom, toggleDrawer, toggleMarks, togglePanel, toggleTheme } from "./shell.js";
import { connectSidebar, removeAll } from "./sidebar.js";
import { conversations, openStore } from "./store.js";

const IDEAS = [
  "Explain speculative decoding in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "What is the weather in San Francisco?",
];
const POLL_MS = 3000;
const RETRY_MS = 700;
const MOST_HEIGHT = 240; // of the message field
let isReady = false, needsKey = false, retry = 0;

// -- the message field

const prompt = $("prompt");

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, MOST_HEIGHT)}px`;
}

function write(text) {
  prompt.value = text;
  fit();
  prompt.focus();
}

prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !prompt.value && editLast()) event.preventDefault();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (needsKey) start(); // asks for it again
  if ((!text.trim() && !hasFiles()) || isReading() || isRunning() || !isReady) return;
  write("");
  send(text);
});
$("s-system").addEventListener("input", (event) => change({ system: event.target.value }));
$("s-schema").addEventListener("input", (event) => change({ schema: event.target.value }));
$("s-tools").addEventListener("input", (event) => change({ tools: event.target.value }));

// -- buttons and keys

const DO = {
  new() { show(); closeDrawers(); prompt.focus(); },
  side: () => toggleDrawer("side"),
  panel: togglePanel,
  "close-drawers": closeDrawers,
  stop,
  latest: toBottom,
  help: () => $("help-dialog").showModal(),
  reset: resetSettings,
  schema() { openPanel(); openOwn("schema"); },
  "no-schema"() { change({ schema: "" }); prompt.focus(); },
  tools() { openPanel(); openOwn("tools"); },
  "no-tools"() { change({ tools: "" }); prompt.focus(); },
  thinking: toggleThinking,
  attach: () => $("file-input").click(),
  search() { openSide(); $("search").focus(); },
  marks: toggleMarks,
  theme: toggleTheme,
  import: () => $("import").click(),
  "export-all": () => download("conversations.json", conversations()),
  "delete-all": removeAll,
};
const ALT = { KeyN: DO.new, KeyD: DO.marks, KeyP: DO.panel, KeyR: answerAgain, KeyK: DO.search, KeyU: DO.attach, KeyT: DO.thinking };

document.addEventListener("click", (event) => DO[event.target.closest("[data-do]")?.dataset.do]?.());
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.altKey && !event.ctrlKey && !event.metaKey && ALT[event.code]) {
    event.preventDefault();
    ALT[event.code]();
  } else if (event.key === "Escape") {
    if (!closeDrawers()) stop();
  } else if (event.key === "?" && !/^(INPUT|TEXTAREA)$/.test(event.target.tagName)) DO.help();
});
$("key-form").addEventListener("submit", () => {
  setKey($("key").value.trim());
  $("key").value = "";
  start();
});

// -- starting, and whether the server is there

function setState(name, text) {
  const dot = $("state");
  dot.dataset.state = name;
  dot.title = text;
  dot.setAttribute("aria-label", text);
}

function showAbsence(error) {
  isReady = false;
  needsKey = error.status === 401;
  if (needsKey) {
    setState("off", "needs an API key");
    askKey(getKey() ? "The key is wrong." : "");
    return;
  }
  const isLoading = error.status === 503;
  $("absence").hidden = false;
  $("absence").textContent = isLoading ? "The model is being loaded." : "The server does not answer. This page goes on as soon as it does.";
  setState(isLoading ? "loading" : "off", isLoading ? "loading the model" : "the server does not answer");
  $("welcome-text").textContent = isLoading ? "The model is being loaded." : error.message;
  clearTimeout(retry);
  retry = setTimeout(start, RETRY_MS);
}

async function start() {
  let about;
  try {
    about = await get("/props");
    showModels(await get("/api/tags"));
    if (propertiesPath() !== "/props") about = await get(propertiesPath());
  } catch (error) {
    showAbsence(error);
    return;
  }
  isReady = true;
  needsKey = false;
  setState("ready", "ready");
  $("absence").hidden = true;
  display(about);
  resume();
}

/** What the server says of itself, which another model may be when it was restarted. */
function display(about) {
  const { model_alias: name, device } = about;
  $("model").textContent = document.title = name;
  const place = device ? `runs on this machine (${device})` : "is loaded by its first question";
  $("welcome-text").textContent = `${name} ${place}.`;
  showDefaults(about.default_generation_settings.params);
  showThinking(about.chat_template);
  setContextLength(about.default_generation_settings.n_ctx);
  showMemory(about.memory);
}

async function poll() {
  if (!isReady || document.hidden) return;
  try {
    showQueue(await get("/health"));
    if (!isRunning()) display(await get(propertiesPath()));
  } catch (error) {
    if (!isRunning()) showAbsence(error);
  }
}

$("ideas").append(...IDEAS.map((text) => h("button", { type: "button", onclick: () => write(text) }, text)));
connectSettings();
connectModels(start);
connectFiles();
connectSidebar({ open: show, leave });
await openStore(refresh);
showAddressed();
start();
setInterval(poll, POLL_MS);
addEventListener("popstate", showAddressed);
document.addEventListener("lost", start);
prompt.focus();
