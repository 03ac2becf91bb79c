// The fields of the panel: what is empty is left to the server, so that its defaults hold.

import { $ } from "./dom.js";
import { preferences, savePreferences } from "./store.js";

const form = $("settings");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "max_tokens", "seed"];

/** Show the server's defaults as placeholders. */
export function showDefaults(params) {
  for (const name of NUMBERS) {
    const value = params[name];
    if (value !== undefined && value !== null) form.elements[name].placeholder = String(+Number(value).toFixed(4));
  }
}

/** Fill the fields with what was chosen before, and keep what is chosen. */
export function connectSettings() {
  restore();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    const field = event.target;
    if (!field.name) return; // the conversation's own
    preferences.request[field.name] = field.type === "checkbox" ? field.checked : field.value;
    savePreferences();
  });
}

function restore() {
  for (const field of form.elements) {
    if (!field.name) continue;
    const kept = preferences.request[field.name];
    if (field.type === "checkbox") field.checked = kept ?? true;
    else field.value = kept ?? "";
  }
}

export function resetSettings() {
  preferences.request = {};
  savePreferences();
  restore();
}

// -- the conversation's own: a schema and tools, as texts in JSON

const OWN = {
  schema: { label: "JSON schema", isOn: "Answers follow this schema.", problem: (text) => schemaProblem(text) },
  tools: { label: "Tools", isOn: "The model may call these.", problem: (text) => toolsProblem(text) },
};

/** Show a conversation's schema and tools: in their fields, and at the message field that they are on. */
export function showOwn(conversation) {
  for (const [name, { label, isOn, problem }] of Object.entries(OWN)) {
    const text = conversation[name] ?? "", field = $(`s-${name}`), wrong = problem(text);
    if (field.value !== text) field.value = text;
    field.setAttribute("aria-invalid", String(Boolean(wrong)));
    $(`${name}-state`).textContent = wrong || (text.trim() ? isOn : "");
    $(`${name}-state`).classList.toggle("error", Boolean(wrong));
    $(`${name}-chip`).hidden = !text.trim();
    $(`${name}-chip`).classList.toggle("error", Boolean(wrong));
    $(`${name}-name`).textContent = wrong ? `${label}: not valid` : label;
  }
}

export function openOwn(name) {
  $(`${name}-box`).open = true;
  $(`s-${name}`).focus();
}

function schemaProblem(text) {
  try {
    const schema = text.trim() ? JSON.parse(text) : {};
    return typeof schema !== "object" || Array.isArray(schema) || schema === null ? "A schema is a JSON object." : "";
  } catch (error) {
    return `Not valid JSON: ${error.message}`;
  }
}

function toolsProblem(text) {
  try {
    return toolsOf(text).every(({ function: { name } }) => name) ? "" : "A tool needs a name.";
  } catch (error) {
    return `Not valid JSON: ${error.message}`;
  }
}

/** The tools of a text in OpenAI's form. Functions alone are taken too, and one without a list. */
function toolsOf(text) {
  if (!text.trim()) return [];
  return [JSON.parse(text)].flat().map((each) => ({
    type: "function",
    function: each?.function ?? {
      name: each?.name, description: each?.description, parameters: each?.parameters ?? each?.inputSchema ?? each?.input_schema,
    },
  }));
}

// -- thinking, where the model's template has a switch for it

let hasThinking = false;

/** `template`: of the model that answers. */
export function showThinking(template = "") {
  hasThinking = template.includes("enable_thinking");
  $("thinking").hidden = !hasThinking;
  $("thinking").setAttribute("aria-pressed", String(preferences.thinking));
}

export function toggleThinking() {
  preferences.thinking = !preferences.thinking;
  savePreferences();
  $("thinking").setAttribute("aria-pressed", String(preferences.thinking));
}

// -- requests

/** The first thing that is wrong with the fields, or "". */
export function settingsProblem() {
  const wrong = [...form.elements].find((field) => field.name && !field.validity.valid);
  const label = wrong?.closest("label")?.firstChild.textContent.trim();
  if (wrong) return `${label}: ${wrong.validationMessage}`;
  return schemaProblem($("s-schema").value) || toolsProblem($("s-tools").value);
}

/** The request's fields that were chosen, here and for the conversation. */
export function requestFields({ schema = "", tools = "" }) {
  const fields = {};
  for (const name of NUMBERS) {
    const text = form.elements[name].value.trim();
    if (text !== "") fields[name] = Number(text);
  }
  const length = form.elements.draft_length.value.trim();
  if (!form.elements.speculative.checked) fields.speculative = false;
  else if (length !== "") fields.speculative = { draft_length: Number(length) };
  if (schema.trim()) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema), strict: true } };
  }
  if (tools.trim()) fields.tools = toolsOf(tools);
  if (hasThinking) fields.chat_template_kwargs = { enable_thinking: preferences.thinking };
  return fields;
}
