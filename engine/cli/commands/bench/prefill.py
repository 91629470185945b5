"""Prompt tokens per second by prompt length and token budget, in this process.

Prompts that arrive at once are computed, and one token is generated from each. On a GPU each row
also says in which share of the time the GPU works.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from kiln.engine.cli.bench_model import add_bench_arguments, finish, measuring
from kiln.engine.cli.numbers import batches, counts

HELP = "prompt tokens per second by prompt length and token budget"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_bench_arguments(parser, ("vllm",), budget=None)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--prompts",
        type=batches,
        metavar="LIST",
        help="numbers of prompts, and the tokens of each; default 64x256,32x2048,8x8000, without "
        "those that are too long for the model",
    )
    load.add_argument(
        "--budgets",
        type=counts,
        default=(),
        metavar="LIST",
        help="token budgets to measure besides that of --max-num-batched-tokens, which is each "
        "engine's own default if it is not given",
    )


def run(args: argparse.Namespace) -> int:
    """Measure Kiln with each token budget, then the baseline. Raises KilnError."""
    from kiln.engine.bench import prefill
    from kiln.engine.bench.choice import by_product, kiln_and
    from kiln.engine.bench.report import with_ratio
    from kiln.engine.bench.side_by_side import measure_all

    lengths = [num_tokens + 1 for _, num_tokens in args.prompts or prefill.PROMPTS]
    least = None if args.prompts else min(lengths)
    with measuring(args, 1, max(lengths), least) as (subject, python, tell):
        config = subject.config
        context = config.model.max_model_len or max(lengths)
        load = [one for one in args.prompts or prefill.PROMPTS if one[1] < context]
        forms = {"": kiln_and(args.baseline, python, config, tell)}
        for budget in args.budgets:
            limits = replace(config.scheduler, max_num_batched_tokens=budget)
            changed = replace(config, scheduler=limits)
            forms[f", {budget} tokens a step"] = kiln_and(args.baseline, python, changed, tell)
        measured = measure_all(
            by_product(forms),
            lambda engine: prefill.measure(engine, load, subject.model.vocab_size, tell),
            tell,
        )
    case = ("asked_budget", "num_prompts", "prompt_tokens")
    measured.rows = with_ratio(measured.rows, *case, speed="tokens_per_s")
    return finish(args, subject, measured, {"prompts": load}, prefill.markdown, prefill.draw)
