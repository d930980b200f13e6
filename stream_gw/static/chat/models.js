// The models that the caller may use, and the one that is chosen.

import { $ } from "../dom.js";
import { errorOf } from "../session.js";
import { local, remember } from "../storage.js";

const KNOWN = "sgw.models";

export class Models {
  /** `onChange()` tells that another model is chosen. */
  constructor(onChange) {
    this.byId = new Map();
    this.loaded = new Promise((resolve) => (this.settle = resolve)); // the list was asked for, whatever came of it
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

  /** Loads the list; when that fails, shows the last known one and throws. */
  async load(token) {
    let models = JSON.parse(local.getItem(KNOWN) ?? "[]");
    // The release before stored names alone.
    models = models.map((model) => (typeof model === "string" ? { id: model } : model));
    try {
      const response = await fetch("/v1/models", { headers: { authorization: `Bearer ${await token()}` } });
      if (!response.ok) throw await errorOf(response);
      models = (await response.json()).data.map(({ id, input_modalities }) => ({ id, input_modalities }));
      remember(KNOWN, JSON.stringify(models));
    } finally {
      this.byId = new Map(models.map((model) => [model.id, model]));
      $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
      const chosen = local.getItem("sgw.model");
      if (this.byId.has(chosen)) $("model").value = chosen;
      this.settle();
    }
  }
}
