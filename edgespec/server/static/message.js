// One message of a conversation as an element: its text with the drafted parts marked, its actions, its figures.

import { h, iconButton } from "./dom.js";
import { render } from "./markdown.js";

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

function painter({ content, runs }) {
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

/** What happens in a message is told to `actions`: copy, edit(index, text), again(index), goOn(index), dropSchema(index). */
export class MessageView {
  constructor(message, index, actions) {
    Object.assign(this, { message, index, actions });
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), h("div", {}));
    this.text = h("div", { class: "text" });
    this.note = h("div", { class: "note" });
    this.foot = h("footer", { class: "meta" });
    const who = h("h3", { class: "hidden" }, message.role === "user" ? "You" : "Answer");
    this.element = h("article", { class: message.role }, who, this.reasoning, this.text, this.note, this.foot);
    this.draw(false);
  }

  draw(isRunning) {
    const { message } = this;
    this.element.classList.toggle("running", isRunning);
    this.reasoning.hidden = !message.reasoning;
    if (message.reasoning) {
      this.reasoning.lastChild.textContent = message.reasoning;
      if (isRunning) this.reasoning.open = !message.content; // open until the answer begins
    }
    if (message.role === "user") this.text.textContent = message.content;
    else render(this.text, message.content, painter(message));
    if (isRunning) return;
    this.note.replaceChildren(...this.notes());
    this.foot.replaceChildren(...this.buttons(), h("span", {}, message.role === "user" ? "" : figures(message)));
  }

  notes() {
    const { message, actions, index } = this;
    const more = message.content && h("button", { type: "button", onclick: () => actions.goOn(index) }, "Continue");
    if (message.error) {
      const again = h("button", { type: "button", onclick: () => actions.again(index) }, "Try again");
      const without = message.error.param?.startsWith("response_format")
        && h("button", { type: "button", onclick: () => actions.dropSchema(index) }, "Answer without the schema");
      return [h("div", { class: "problem", role: "alert" }, h("p", {}, message.error.message), h("div", {}, again, more || "", without || ""))];
    }
    if (!ENDINGS[message.ending]) return [];
    return [h("div", { class: "ending" }, h("p", { class: "quiet" }, ENDINGS[message.ending]), more || "")];
  }

  buttons() {
    const { message, actions, index } = this;
    const copy = message.content && iconButton("copy", "Copy", () => actions.copy(message.content));
    const other = message.role === "user" ? iconButton("edit", "Edit and send again", () => this.edit())
      : !message.error && iconButton("again", "Answer again", () => actions.again(index));
    return [copy, other].filter(Boolean);
  }

  /** The text of a user's message as a field. */
  edit() {
    const field = h("textarea", { "aria-label": "Edit the message", rows: "3" });
    field.value = this.message.content;
    const close = () => { this.element.classList.remove("editing"); this.draw(false); };
    const save = () => field.value.trim() && this.actions.edit(this.index, field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
    });
    this.element.classList.add("editing");
    this.foot.replaceChildren(
      h("button", { type: "button", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: save }, "Send"),
    );
    this.text.replaceChildren(field);
    field.focus();
  }
}
