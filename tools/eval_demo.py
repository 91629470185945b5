"""Ask the demo model held-out questions and print how many it answers exactly.

Against a running server:  python tools/eval_demo.py --url http://127.0.0.1:8000
With transformers:         python tools/eval_demo.py --local engine/demo
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from demo_tasks import TASKS, Pair, held_out
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

MAX_NEW_TOKENS = 64
_LOCAL_BATCH = 64


def generate_answers(model: Any, tokenizer: Any, questions: Sequence[str]) -> list[str]:
    """Answer questions greedily with a transformers model, in one left-padded batch."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        output = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    width = encoded["input_ids"].shape[1]
    return list(tokenizer.batch_decode(output[:, width:], skip_special_tokens=True))


def ask_local(folder: str, pairs: Sequence[Pair], advance: Callable[[int], None]) -> list[str]:
    """Answer all questions with transformers from a model folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The model is tiny: with more threads, synchronization takes longer than the work.
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: list[str] = []
    for start in range(0, len(pairs), _LOCAL_BATCH):
        chunk = [pair.question for pair in pairs[start : start + _LOCAL_BATCH]]
        answers += generate_answers(model, tokenizer, chunk)
        advance(len(chunk))
    return answers


async def _ask_one(client: httpx.AsyncClient, model: str, question: str) -> str:
    response = await client.post(
        "/v1/chat/completions",
        json={
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
        },
    )
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"] or "")


async def ask_server(
    url: str, pairs: Sequence[Pair], concurrency: int, advance: Callable[[int], None]
) -> list[str]:
    """Answer all questions through an OpenAI-compatible server, `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    # Requests that wait for a busy server must not fail here, so the limit is generous.
    timeout = httpx.Timeout(300.0, connect=10.0)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
        listing = await client.get("/v1/models")
        listing.raise_for_status()
        model = str(listing.json()["data"][0]["id"])

        async def guarded(pair: Pair) -> str:
            async with gate:
                answer = await _ask_one(client, model, pair.question)
            advance(1)
            return answer

        return list(await asyncio.gather(*(guarded(pair) for pair in pairs)))


def print_report(console: Console, pairs: Sequence[Pair], answers: Sequence[str]) -> float:
    """Print a table per task and every wrong answer; return the percentage that is exact."""
    right = dict.fromkeys(TASKS, 0)
    asked = dict.fromkeys(TASKS, 0)
    for pair, answer in zip(pairs, answers, strict=True):
        asked[pair.task] += 1
        right[pair.task] += answer == pair.answer
        if answer != pair.answer:
            line = f"wrong {pair.question!r}: {answer!r}, expected {pair.answer!r}"
            console.print(line, markup=False, highlight=False)
    total = 100.0 * sum(right.values()) / len(pairs)
    table = Table(title="Held-out questions", show_footer=True)
    table.add_column("task", footer="total")
    table.add_column("asked", justify="right", footer=str(len(pairs)))
    table.add_column("exact", justify="right", footer=str(sum(right.values())))
    table.add_column("percent", justify="right", footer=f"{total:.1f}")
    for task in TASKS:
        if asked[task]:
            share = 100.0 * right[task] / asked[task]
            table.add_row(task, str(asked[task]), str(right[task]), f"{share:.1f}")
    console.print(table)
    return total


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default="http://127.0.0.1:8000", help="server to ask")
    where.add_argument("--local", metavar="FOLDER", help="run this folder with transformers")
    parser.add_argument("--count", type=int, default=200, help="number of questions")
    parser.add_argument("--seed", type=int, default=1, help="which questions")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    parser.add_argument("--minimum", type=float, default=95.0, help="percent needed to succeed")
    args = parser.parse_args(argv)
    if args.count < 1 or args.concurrency < 1:
        parser.error("--count and --concurrency must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the questions; return 0 when enough answers are exact, else 1."""
    args = _parse(argv)
    pairs = held_out(args.count, args.seed)
    console = Console()
    columns = (TextColumn("asking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("asking", total=len(pairs))

        def advance(count: int) -> None:
            progress.advance(bar, count)

        if args.local:
            answers = ask_local(args.local, pairs, advance)
        else:
            try:
                answers = asyncio.run(ask_server(args.url, pairs, args.concurrency, advance))
            except httpx.HTTPError as error:
                console.print(f"{args.url}: {error or type(error).__name__}", style="red")
                return 1
    return 0 if print_report(console, pairs, answers) >= args.minimum else 1


if __name__ == "__main__":
    sys.exit(main())
