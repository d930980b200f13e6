// The models that the caller may use, and the one that is chosen.

import { backoffMs } from "../client.js";
import { $ } from "../dom.js";
import { local, remember } from "../storage.js";

const KNOWN = "sgw.models";

export class Models {
  /** `onChange()` tells that another model is chosen, or may be. */
  constructor(onChange) {
    this.onChange = onChange;
    this.byId = new Map();
    this.tries = 0; // that failed in a row
    this.timer = null;
    this.loaded = new Promise((resolve) => (this.settle = resolve)); // there is a list, or there will be none
    $("model").addEventListener("change", () => {
      remember("sgw.model", $("model").value);
      onChange();
    });
  }

  get chosen() {
    return $("model").value;
  }

  get takesImages() {
    return this.byId.get(this.chosen)?.input_modalities?.includes("image") === true;
  }

  /**
   * Loads the list. Until then shows the last known one. `tell(text)` is told of an error, and "" once it is over.
   * After an error that may pass, tries again.
   */
  async load(session, tell) {
    clearTimeout(this.timer);
    try {
      const response = await session.call("GET", "/v1/models", await session.getToken());
      const models = (await response.json()).data.map(({ id, input_modalities }) => ({ id, input_modalities }));
      remember(KNOWN, JSON.stringify(models));
      this.show(models);
      if (this.tries > 0) tell("");
      this.tries = 0;
    } catch (error) {
      if (!session.token && !error.retriable) return; // the page asks for a key, and loads the list with it
      if (this.byId.size === 0) this.show(known());
      tell(`The list of models could not be loaded: ${error.message}`);
      if (error.retriable) {
        const delayMs = Math.max((error.retryAfterS ?? 0) * 1000, backoffMs(this.tries));
        this.tries += 1;
        this.timer = setTimeout(() => this.load(session, tell), delayMs);
        if (!this.chosen) return; // prompts wait for the list
      }
    }
    this.settle();
    this.onChange();
  }

  show(models) {
    const chosen = this.chosen || local.getItem("sgw.model");
    this.byId = new Map(models.map((model) => [model.id, model]));
    $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
    if (this.byId.has(chosen)) $("model").value = chosen;
  }
}

function known() {
  const models = JSON.parse(local.getItem(KNOWN) ?? "[]");
  // The release before stored names alone.
  return models.map((model) => (typeof model === "string" ? { id: model } : model));
}
