// Which model answers, where the server has several: a list in place of the model's name.

import { $, h } from "./dom.js";
import { preferences, savePreferences } from "./store.js";

const list = $("models");
let names = []; // the first one answers where none is chosen

/** The chosen model; "" for the server's only or first one. */
const chosen = () => (names.length > 1 && names.slice(1).includes(preferences.model) ? preferences.model : "");

/** The part of a request that says which model is to answer. */
export const modelField = () => (chosen() ? { model: chosen() } : {});

/** Where the server tells of the model that answers. */
export const propertiesPath = () => (chosen() ? `/props?model=${encodeURIComponent(chosen())}` : "/props");

/** Offer the models of `/api/tags`. */
export function showModels({ models }) {
  names = models.map(({ name }) => name);
  list.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  list.value = chosen() || names[0];
  list.hidden = names.length < 2;
  $("model").hidden = !list.hidden;
}

/** Keep what is chosen, and call `onChange` then. */
export function connectModels(onChange) {
  list.addEventListener("change", () => {
    preferences.model = list.value;
    savePreferences();
    onChange();
  });
}
