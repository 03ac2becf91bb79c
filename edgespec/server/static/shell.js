// What surrounds the conversation: drawers on narrow screens, dialogs, the theme, following the text as it grows.

import { $ } from "./dom.js";
import { preferences, savePreferences } from "./store.js";

// -- scrolling: stays at the end unless the reader has scrolled up

const NEAR_END = 48;
const scroll = $("scroll");
let isAtEnd = true;

scroll.addEventListener("scroll", () => {
  isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END;
  $("latest").hidden = isAtEnd;
});

export function toBottom() {
  scroll.scrollTop = scroll.scrollHeight;
  isAtEnd = true;
  $("latest").hidden = true;
}

export function follow() {
  if (isAtEnd) toBottom();
}

// -- drawers

const wide = matchMedia("(min-width: 70rem)"); // both side columns fit
let drawer = "";
let opener = null; // gets the focus back

function draw() {
  document.body.classList.toggle("with-panel", preferences.panel && wide.matches);
  $("panel").classList.toggle("open", drawer === "panel");
  $("side").classList.toggle("open", drawer === "side");
  $("shade").classList.toggle("open", drawer !== "");
  $("panel-button").setAttribute("aria-expanded", String(wide.matches ? preferences.panel : drawer === "panel"));
  $("side-button").setAttribute("aria-expanded", String(drawer === "side"));
}

export function toggleDrawer(name) {
  if (drawer === name) { closeDrawers(); return; }
  opener = document.activeElement;
  drawer = name;
  draw();
  $(name).querySelector("button:not([hidden]), input, textarea")?.focus();
}

/** Whether one was open. */
export function closeDrawers() {
  const wasOpen = drawer !== "";
  drawer = "";
  draw();
  if (wasOpen) opener?.focus();
  return wasOpen;
}

export function togglePanel() {
  if (!wide.matches) { toggleDrawer("panel"); return; }
  preferences.panel = !preferences.panel;
  savePreferences();
  draw();
}

/** Have the conversations be seen, which narrow screens hide. */
export function openSide() {
  if (getComputedStyle($("side")).display === "none") toggleDrawer("side");
}

export function openPanel() {
  if ($("panel-button").getAttribute("aria-expanded") !== "true") togglePanel();
}

wide.addEventListener("change", closeDrawers);

// -- colours

export function drawMarks() {
  document.body.classList.toggle("marks", preferences.keepMarks);
  $("marks").setAttribute("aria-pressed", String(preferences.keepMarks));
}

export function toggleMarks() {
  preferences.keepMarks = !preferences.keepMarks;
  savePreferences();
  drawMarks();
}

export function toggleTheme() {
  const isDark = preferences.theme ? preferences.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = preferences.theme = isDark ? "light" : "dark";
  savePreferences();
}

// -- dialogs

/** Whether the person agrees. */
export function confirmed(question) {
  const dialog = $("ask-dialog");
  $("ask-text").textContent = question;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

export function askKey(problem) {
  $("key-error").textContent = problem;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

drawMarks();
draw();
