// The picker of the model: its names, and its LoRA adapters.

import { byId, element, json } from "./common.js";

const NAME = "kiln.model";

/** Fills the picker. `chosen`: the picked name; `picked(card)` is called for it. */
export class ModelPicker {
  constructor(picked) {
    this._cards = [];
    this._picked = picked;
    this._select = byId("model");
    this._select.onchange = () => {
      localStorage.setItem(NAME, this._select.value);
      this._picked(this._card());
    };
    this._select.onfocus = () => this.load(); // adapters come and go
  }

  get chosen() {
    return this._select.value || null;
  }

  /** Read the models of the server. Returns why there is nothing to chat with; null if there is. */
  async load() {
    try {
      const { data } = await json("v1/models");
      if (JSON.stringify(data) !== JSON.stringify(this._cards)) this._show(data);
    } catch (error) {
      return `The models cannot be read: ${error.message}.`;
    }
    if (this._card()?.task !== "embed") return null;
    return "This server computes embeddings: there is nothing to chat with. Programs use /v1/embeddings.";
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
