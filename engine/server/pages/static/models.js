// The picker of the model: its names, and its LoRA adapters.

import { byId, element, json } from "./common.js";

const NAME = "kiln.model";

/**
 * Fills the picker. `chosen`: the picked name; `picked(card)` is called for it, and
 * `look()` when the user is about to pick.
 */
export class ModelPicker {
  constructor(picked, look) {
    this._cards = [];
    this._picked = picked;
    this._select = byId("model");
    this._select.onchange = () => {
      localStorage.setItem(NAME, this._select.value);
      this._picked(this._card());
    };
    this._select.onfocus = look; // adapters come and go
  }

  get chosen() {
    return this._select.value || null;
  }

  /** Whether the model writes text. */
  get canChat() {
    return this._card()?.task !== "embed";
  }

  /** Read the models of the server. Throws ApiError, and TypeError if it does not answer. */
  async load() {
    const { data } = await json("v1/models");
    if (JSON.stringify(data) !== JSON.stringify(this._cards)) this._show(data);
  }

  _card() {
    return this._cards.find((card) => card.id === this._select.value);
  }

  _show(cards) {
    const wanted = this._select.value || localStorage.getItem(NAME);
    this._cards = cards;
    const option = (card) => element("option", { value: card.id }, card.id);
    const adapters = cards.filter((card) => card.parent !== null);
    this._select.replaceChildren(...cards.filter((card) => card.parent === null).map(option));
    if (adapters.length) {
      this._select.append(element("optgroup", { label: `LoRA adapters of ${adapters[0].parent}` }, ...adapters.map(option)));
    }
    if (cards.some((card) => card.id === wanted)) this._select.value = wanted;
    const length = this._card()?.max_model_len;
    byId("context").textContent = length ? `${length.toLocaleString("en")} tokens` : "";
    this._picked(this._card());
  }
}
