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
    if (!field.name) return;
    preferences.request[field.name] = field.type === "checkbox" ? field.checked : field.value;
    savePreferences();
    checkSchema();
  });
}

function restore() {
  for (const field of form.elements) {
    if (!field.name) continue;
    const kept = preferences.request[field.name];
    if (field.type === "checkbox") field.checked = kept ?? true;
    else field.value = kept ?? "";
  }
  if (form.elements.schema.value) $("schema-box").open = true;
  checkSchema();
}

export function resetSettings() {
  preferences.request = {};
  savePreferences();
  restore();
}

export function dropSchema() {
  form.elements.schema.value = preferences.request.schema = "";
  savePreferences();
  checkSchema();
}

function checkSchema() {
  const field = form.elements.schema, text = field.value.trim();
  let problem = "";
  try {
    const schema = text ? JSON.parse(text) : {};
    if (typeof schema !== "object" || Array.isArray(schema) || schema === null) problem = "A schema is a JSON object.";
  } catch (error) {
    problem = `Not valid JSON: ${error.message}`;
  }
  field.setAttribute("aria-invalid", String(Boolean(problem)));
  $("schema-state").textContent = problem || (text ? "Answers follow this schema." : "");
  $("schema-state").classList.toggle("error", Boolean(problem));
  return problem;
}

/** The first thing that is wrong with the fields, or "". */
export function settingsProblem() {
  const wrong = [...form.elements].find((field) => field.name && !field.validity.valid);
  const label = wrong?.closest("label")?.firstChild.textContent.trim();
  return wrong ? `${label}: ${wrong.validationMessage}` : checkSchema();
}

/** The request's fields that were chosen. */
export function requestFields() {
  const fields = {};
  for (const name of NUMBERS) {
    const text = form.elements[name].value.trim();
    if (text !== "") fields[name] = Number(text);
  }
  const length = form.elements.draft_length.value.trim();
  if (!form.elements.speculative.checked) fields.speculative = false;
  else if (length !== "") fields.speculative = { draft_length: Number(length) };
  const schema = form.elements.schema.value.trim();
  if (schema) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema), strict: true } };
  }
  return fields;
}
