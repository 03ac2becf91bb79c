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

/** Show the schema of the conversation: in its field, and at the message field that it is on. */
export function showSchema(text = "") {
  const field = $("s-schema"), problem = schemaProblem(text), isOn = Boolean(text.trim());
  if (field.value !== text) field.value = text;
  field.setAttribute("aria-invalid", String(Boolean(problem)));
  $("schema-state").textContent = problem || (isOn ? "Answers follow this schema." : "");
  $("schema-state").classList.toggle("error", Boolean(problem));
  $("schema-chip").hidden = !isOn;
  $("schema-chip").classList.toggle("error", Boolean(problem));
  $("schema-name").textContent = problem ? "JSON schema: not valid" : "JSON schema";
}

export function openSchema() {
  $("schema-box").open = true;
  $("s-schema").focus();
}

function schemaProblem(text) {
  try {
    const schema = text.trim() ? JSON.parse(text) : {};
    return typeof schema !== "object" || Array.isArray(schema) || schema === null ? "A schema is a JSON object." : "";
  } catch (error) {
    return `Not valid JSON: ${error.message}`;
  }
}

/** The first thing that is wrong with the fields, or "". */
export function settingsProblem() {
  const wrong = [...form.elements].find((field) => field.name && !field.validity.valid);
  const label = wrong?.closest("label")?.firstChild.textContent.trim();
  return wrong ? `${label}: ${wrong.validationMessage}` : schemaProblem($("s-schema").value);
}

/** The request's fields that were chosen; `schema`: of the conversation, as text. */
export function requestFields(schema = "") {
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
  return fields;
}
