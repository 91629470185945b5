"""Adapters of tiny models, made and applied by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny.model import all_tiny
from tiny_answers import Logits, ask, assert_agrees, draw_prompts

from kiln import LLM


def adapt(name: str, root: Path) -> tuple[Path, dict[str, str], Callable[[str | None], Logits]]:
    """Write a tiny model and two adapters: "all" of its targets, and "some" of them.

    Returns the model's folder, the adapters' folders, and a function that returns PEFT's logits
    with one of the adapters, or with none.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    one = all_tiny()[name]
    base = one.save(root / "model")
    forms = {"all": (5, one.targets), "some": (3, one.targets[1::2])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form, (rank, targets) in forms.items():
            config = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=list(targets))
            model: Any = get_peft_model(base, config)
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    torch.nn.init.normal_(parameter, 0.0, 0.2)
            model.save_pretrained(root / form)
            base = model.unload()
        model = PeftModel.from_pretrained(base, root / "all", adapter_name="all")
        model.load_adapter(root / "some", "some")
    model.eval()

    def logits(form: str | None) -> Logits:
        def run(token_ids: torch.Tensor, total: int) -> torch.Tensor:
            if form is None:
                with torch.inference_mode(), model.disable_adapter():
                    return one.logits(model, token_ids, total)
            model.set_adapter(form)
            with torch.inference_mode():
                return one.logits(model, token_ids, total)

        return run

    return root / "model", {form: str(root / form) for form in forms}, logits


def check(llm: LLM, logits: Callable[[str | None], Logits]) -> None:
    """Ask for each adapter and for none, all in one batch."""
    forms: Sequence[str | None] = [None, "all", "some", "all"]
    answers = ask(llm, draw_prompts((9, 26, 17, 3)), whole=True, lora=forms)
    for form, answer in zip(forms, answers, strict=True):
        assert_agrees(logits(form), [answer])
