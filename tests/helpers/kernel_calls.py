"""Record which kernels a model loads, and which of them it calls."""

from __future__ import annotations

from typing import Any

import pytest

from kiln import LLM, SamplingParams
from kiln.jit_kernels import implementations, torch_ops
from kiln.jit_kernels.implementations import run_reference

Program = tuple[str, ...]  # an operator and the values of its variant
LONG = [(7 * place + 5) % 250 for place in range(90)]  # three of them need LoRA's large chunks


class KernelCalls:
    """The programs that were loaded for models, and those that they called.

    Every kernel counts as loaded by the host toolchain; its reference runs in its place.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.loaded: set[Program] = set()
        self.called: set[Program] = set()
        decide, run = implementations.decide, implementations.run

        def decided(*arguments: Any) -> Any:
            made = decide(*arguments)
            own = [one for one in made.made if one.implementation != "torch"]
            self.loaded |= {(one.spec.name, *one.variant.values()) for one in own}
            return made

        def ran(spec: Any, a: Any) -> None:
            run(spec, a)
            program = (spec.name, *spec.bind(a).variant.values())
            device = a[spec.parameters.first_tensor].device
            if implementations._decided[(device, *program)].implementation != "torch":
                self.called.add(program)

        patch.setattr("kiln.engine.runner.loaded_model.decide", decided)
        patch.setattr(torch_ops, "run", ran)
        host = implementations.host
        patch.setattr(host, "run", lambda spec, a, **settings: run_reference(spec, a))


def ask_everything(llm: LLM, adapters: tuple[str | None, ...] = (None,)) -> None:
    """Send requests that use every setting of sampling, with a short prompt and long ones."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 3, "logprobs": 2},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2, 3], "min_tokens": 2},
        {"bad_words_token_ids": [[4], [5, 6]]},
        {"prompt_logprobs": 2},
    ]
    room = llm.core.max_model_len - 8
    prompts = [[3, 5, 4], *[LONG[:room]] * (len(settings) - 1)]
    for adapter in adapters:
        params = [SamplingParams(**{"temperature": 0, "max_tokens": 3, **own}) for own in settings]
        llm.generate(prompts, params, lora=adapter)
