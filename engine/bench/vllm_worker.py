"""Run vLLM for a benchmark: one JSON object per line in and out. It imports nothing from Kiln.

Its interpreter may differ from Kiln's, in an environment where Kiln is not installed. In: ``{"llm":
keywords}`` once, then ``{"prompts": [[…]], "lengths": […]}`` for each run. With LoRA a run also has
``"adapters"``: null or the arguments of a LoRARequest for each prompt. ``"structured"`` are the
parameters of structured outputs, if any. Out: ``{"seconds": …}`` with the time of loading or of the
run, and once ``versions`` and ``token_budget``; or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load the model, then run the batches that arrive on stdin until it is closed."""
    # vLLM logs to stdout, and its processes inherit it: from here on that is stderr.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if llm is None:
                llm, reply = _load(asked["llm"])
            else:
                reply = _run(llm, **asked)
        except Exception as error:  # vLLM may raise anything; Kiln's side reports it
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")


def _load(keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    begun = time.perf_counter()
    import torch
    import vllm

    llm = vllm.LLM(**keywords)
    seconds = time.perf_counter() - begun
    versions = {"vllm": vllm.__version__, "vllm's torch": torch.__version__}
    budget = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    return llm, {"seconds": seconds, "versions": versions, "token_budget": budget}


def _run(
    llm: Any,
    prompts: list[list[int]],
    lengths: list[int],
    adapters: list[tuple[str, int, str] | None] | None = None,
    structured: dict[str, Any] | None = None,
) -> dict[str, Any]:
    from vllm import SamplingParams

    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    if structured is not None:
        from vllm.sampling_params import StructuredOutputsParams

        settings["structured_outputs"] = StructuredOutputsParams(**structured)
    params = [SamplingParams(max_tokens=length, **settings) for length in lengths]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    lora = {}
    if adapters is not None:
        from vllm.lora.request import LoRARequest

        lora = {"lora_request": [one and LoRARequest(*one) for one in adapters]}
    begun = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False, **lora)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "made": [len(one.outputs[0].token_ids) for one in outputs]}


if __name__ == "__main__":
    main()
