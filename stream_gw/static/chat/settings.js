// Settings of one conversation: system prompt, temperature, longest answer. Empty fields leave it to the model.

import { $ } from "../dom.js";

const TEMPERATURE_MAX = 2;

/** The fields of a request's body that the settings ask for. */
export function bodyFields({ temperature, maxTokens } = {}) {
  return { ...(temperature !== undefined && { temperature }), ...(maxTokens !== undefined && { max_tokens: maxTokens }) };
}

export const systemMessage = ({ system } = {}) => (system ? [{ role: "system", content: system }] : []);

function numberOf(field) {
  return field.value.trim() === "" ? undefined : field.valueAsNumber;
}

export class SettingsDialog {
  /** `onSave(settings)` gets the new settings. */
  constructor(onSave) {
    this.dialog = $("settings");
    const form = this.dialog.querySelector("form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!form.reportValidity()) return;
      onSave(this.read());
      this.dialog.close();
    });
    $("settings-leave").addEventListener("click", () => this.dialog.close());
    $("temperature").max = TEMPERATURE_MAX;
  }

  read() {
    const settings = { system: $("system").value.trim() || undefined };
    settings.temperature = numberOf($("temperature"));
    settings.maxTokens = numberOf($("max-tokens"));
    return JSON.parse(JSON.stringify(settings)); // without the fields that are empty
  }

  open({ system, temperature, maxTokens } = {}) {
    $("system").value = system ?? "";
    $("temperature").value = temperature ?? "";
    $("max-tokens").value = maxTokens ?? "";
    this.dialog.showModal();
  }
}

/** Marks the button while a conversation has settings of its own. */
export function showSettings(settings) {
  const changed = Object.keys(settings ?? {}).length > 0;
  const label = changed ? "Settings of this conversation (changed)" : "Settings of this conversation";
  $("open-settings").classList.toggle("changed", changed);
  $("open-settings").setAttribute("aria-label", label);
  $("open-settings").title = label;
}
