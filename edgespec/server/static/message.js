// One message of a conversation as an element: its text with the drafted parts marked, its actions, its figures.

import { callCard, h, iconButton } from "./dom.js";
import { fileChip } from "./files.js";
import { render as renderPlain } from "./markdown.js";
import { loadRich, renderRich } from "./rich.js";

const render = await loadRich() ? renderRich : renderPlain;
const NUM_COLOURS = 10;
const seen = new Map(); // the drafters of the conversation that is shown, in order of appearance: its colour's number

/** The class that colours what `drafter` proposed. */
export function colourOf(drafter) {
  if (!seen.has(drafter)) seen.set(drafter, seen.size % NUM_COLOURS);
  return `d${seen.get(drafter)}`;
}

/** Another conversation is shown. */
export const resetColours = () => seen.clear();

/** Add tokens to `message.runs`: [characters, drafter or null], where neighbours of one drafter are one run. */
export function addTokens(message, tokens) {
  for (const { text, drafter } of tokens) {
    const last = message.runs.at(-1);
    if (last && last[1] === drafter) last[0] += text.length;
    else if (text) message.runs.push([text.length, drafter]);
  }
}

function painter({ content, runs = [] }) {
  let offset = 0;
  const spans = runs.map(([length, drafter]) => ({ start: offset, end: (offset += length), drafter }));
  if (offset < content.length) spans.push({ start: offset, end: content.length, drafter: null });
  return (parent, start, end) => {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].end <= start) low = middle + 1; else high = middle;
    }
    for (; low < spans.length && spans[low].start < end; low++) {
      const { drafter } = spans[low];
      const text = content.slice(Math.max(start, spans[low].start), Math.min(end, spans[low].end));
      parent.append(drafter ? h("span", { class: `t ${colourOf(drafter)}`, title: `drafted by ${drafter}` }, text) : text);
    }
  };
}

function figures(message) {
  const timings = message.timings;
  if (!timings?.predicted_n) return "";
  const parts = [`${timings.predicted_n} tokens`, `${timings.predicted_per_second.toFixed(1)} tokens/s`];
  if (timings.draft_n) parts.push(`${Math.round(100 * timings.draft_n_accepted / timings.draft_n)}% of drafts accepted`);
  return parts.join(" · ");
}

const ENDINGS = { stopped: "Stopped.", length: "Ended at the limit of tokens." };
const WHO = { user: "You", assistant: "Answer", tool: "Result of a call" };

/** @typedef {import("./thread.js").Message} Message */

export class MessageView {
  /**
   * @param {Message} message
   * @param {{ versions: Message[], isLast: boolean }} place
   * @param {Object<string, Function>} actions what a message can ask for: copy(text), edit(message, text), again(message),
   *   goOn(message), dropSchema(message), version(message), results(message, texts)
   */
  constructor(message, place, actions) {
    this.message = message;
    this.place = place;
    this.actions = actions;
    /** @type {{ total: number, processed: number } | null} of the prompt */
    this.progress = null;
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}), h("div", {}));
    this.files = h("div", { class: "files" }, ...(message.files ?? []).map((file) => fileChip(file)));
    this.text = h("div", { class: "text" });
    this.calls = h("div", { class: "calls" });
    this.note = h("div", { class: "note" });
    this.foot = h("footer", { class: "meta" });
    const who = h("h3", { class: "hidden" }, WHO[message.role]);
    this.element = h("article", { class: message.role }, who, this.files, this.reasoning, this.text, this.calls, this.note, this.foot);
    this.draw(false);
  }

  draw(isRunning) {
    const { message } = this;
    this.element.classList.toggle("running", isRunning);
    this.drawReasoning(isRunning);
    if (message.role === "user") this.text.textContent = message.content;
    else if (message.role === "tool") this.text.replaceChildren(callCard("Result of the call", message.content));
    else this.drawText();
    if (isRunning) {
      this.note.replaceChildren(...this.reading());
      return;
    }
    this.calls.replaceChildren(...this.callCards());
    this.note.replaceChildren(...this.notes());
    this.foot.replaceChildren(...this.buttons(), h("span", {}, message.role === "assistant" ? figures(message) : ""));
  }

  drawText() {
    const { content } = this.message;
    try {
      render(this.text, content, painter(this.message));
    } catch (error) { // thousands of quotes within quotes: too deep for the stack
      console.warn("the text is shown as it is:", error);
      this.text.replaceChildren(content);
    }
  }

  drawReasoning(isRunning) {
    const { reasoning, content, thoughtMs } = this.message;
    this.reasoning.hidden = !reasoning;
    if (!reasoning) return;
    const isThinking = isRunning && !content;
    const took = thoughtMs ? ` for ${(thoughtMs / 1000).toFixed(1)} s` : "";
    this.reasoning.firstChild.textContent = isThinking ? "Thinking…" : `Thought${took}`;
    this.reasoning.lastChild.textContent = reasoning;
  }

  /** How much of the prompt is read, until the answer begins. */
  reading() {
    const { message, progress } = this;
    if (!progress || message.content || message.reasoning || progress.processed >= progress.total) return [];
    const bar = h("progress", { max: progress.total, value: progress.processed, "aria-label": "Prompt read" });
    const count = `${progress.processed.toLocaleString("en")} of ${progress.total.toLocaleString("en")} tokens`;
    return [h("div", { class: "reading" }, bar, h("span", { class: "quiet" }, `Reading the prompt: ${count}`))];
  }

  /** The calls of an answer; behind the last answer fields for what they gave. */
  callCards() {
    const { message, actions, place } = this, calls = message.calls ?? [];
    const cards = calls.map((call) => {
      const card = callCard("Call", JSON.stringify({ name: call.name, arguments: parsed(call.arguments) }));
      card.open = true;
      return card;
    });
    if (!calls.length || !place.isLast) return cards;
    const fields = calls.map((call) => h("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} gave` }));
    const form = h("form", { class: "results" }, ...fields, h("button", { class: "primary" }, "Send the result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      actions.results(message, fields.map((field) => field.value));
    });
    return [...cards, form];
  }

  notes() {
    const { message, actions, place } = this;
    const more = place.isLast && message.content && h("button", { type: "button", onclick: () => actions.goOn(message) }, "Continue");
    if (message.error) {
      const again = h("button", { type: "button", onclick: () => actions.again(message) }, "Try again");
      const without = message.error.param?.startsWith("response_format")
        && h("button", { type: "button", onclick: () => actions.dropSchema(message) }, "Answer without the schema");
      return [h("div", { class: "problem", role: "alert" }, h("p", {}, message.error.message), h("div", {}, again, more, without))];
    }
    if (!ENDINGS[message.ending]) return [];
    return [h("div", { class: "ending" }, h("p", { class: "quiet" }, ENDINGS[message.ending]), more)];
  }

  buttons() {
    const { message, actions } = this;
    const copy = message.content && iconButton("copy", "Copy", () => actions.copy(message.content));
    const isAnswer = message.role === "assistant";
    const again = isAnswer && !message.error && iconButton("again", "Answer again", () => actions.again(message));
    const edit = (isAnswer ? message.content : message.role === "user")
      && iconButton("edit", isAnswer ? "Edit the answer" : "Edit and send again", () => this.edit());
    return [copy, again, edit, ...this.switcher()].filter(Boolean);
  }

  /** < 1/2 > where there are several versions of the message. */
  switcher() {
    const { message, place: { versions }, actions } = this, at = versions.indexOf(message);
    if (versions.length < 2) return [];
    const button = (name, label, version) => {
      const made = iconButton(name, label, () => actions.version(version));
      made.disabled = !version;
      return made;
    };
    const count = h("span", {}, `${at + 1}/${versions.length}`);
    return [h("span", { class: "versions", role: "group", "aria-label": `Version ${at + 1} of ${versions.length}` },
      button("left", "Earlier version", versions[at - 1]), count, button("right", "Later version", versions[at + 1]))];
  }

  /** The text as a field: another version of a message is sent, one of an answer is kept. */
  edit() {
    const isAnswer = this.message.role === "assistant", lines = this.message.content.split("\n").length;
    const field = h("textarea", { "aria-label": "Edit the message", rows: String(Math.min(Math.max(lines, 3), 20)) });
    field.value = this.message.content;
    const close = () => { this.element.classList.remove("editing"); this.draw(false); };
    const save = () => (field.value.trim() || this.message.files) && this.actions.edit(this.message, field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isAnswer) { event.preventDefault(); save(); }
    });
    this.element.classList.add("editing");
    this.foot.replaceChildren(
      h("button", { type: "button", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: save }, isAnswer ? "Keep" : "Send"),
    );
    this.text.replaceChildren(field);
    field.focus();
  }
}

function parsed(json) {
  try {
    return JSON.parse(json);
  } catch {
    return json;
  }
}
