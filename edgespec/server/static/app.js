// Starts the page and binds its buttons, keys and fields.

import { get, getKey, setKey } from "./api.js";
import { answerAgain, change, editLast, isRunning, refresh, removeAll, send, show, stop } from "./conversation.js";
import { $, download, h } from "./dom.js";
import { connectModels, propertiesPath, showModels } from "./models.js";
import { showMemory, showQueue } from "./panel.js";
import { connectSettings, openSchema, resetSettings, showDefaults } from "./settings.js";
import { askKey, closeDrawers, openPanel, toBottom, toggleDrawer, toggleMarks, togglePanel, toggleTheme } from "./shell.js";
import { conversations } from "./store.js";

const IDEAS = [
  "Explain speculative decoding in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Find me a cheap Italian restaurant for tonight.",
];
const POLL_MS = 3000;
const RETRY_MS = 700;
const MOST_HEIGHT = 240; // of the message field
let isReady = false, needsKey = false;

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
  if (!text.trim() || isRunning() || !isReady) return;
  write("");
  send(text);
});
$("s-system").addEventListener("input", (event) => change({ system: event.target.value }));
$("s-schema").addEventListener("input", (event) => change({ schema: event.target.value }));

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
  schema() { openPanel(); openSchema(); },
  "no-schema"() { change({ schema: "" }); prompt.focus(); },
  marks: toggleMarks,
  theme: toggleTheme,
  "export-all": () => download("conversations.json", conversations()),
  "delete-all": removeAll,
};
const ALT = { KeyN: DO.new, KeyD: DO.marks, KeyP: DO.panel, KeyR: answerAgain };

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
  setState(isLoading ? "loading" : "off", isLoading ? "loading the model" : "the server does not answer");
  $("welcome-text").textContent = isLoading ? "The model is being loaded." : error.message;
  setTimeout(start, RETRY_MS);
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
  display(about);
}

/** What the server says of itself, which another model may be when it was restarted. */
function display(about) {
  const { model_alias: name, engine, device, drafter } = about;
  $("model").textContent = document.title = name;
  const place = device ? `${engine} on ${device}, drafter ${drafter}.` : "its first question loads it.";
  $("welcome-text").textContent = `${name} runs on this machine: ${place}`;
  showDefaults(about.default_generation_settings.params);
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
show();
start();
setInterval(poll, POLL_MS);
addEventListener("storage", refresh);
prompt.focus();
