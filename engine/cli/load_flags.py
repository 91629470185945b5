"""The flags of a load on a server, under the names of vLLM's ``bench serve``, and what they say."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kiln.engine.cli.numbers import above_zero, count, counts, goals, percentiles, rates, share
from kiln.engine.cli.parser import KilnParser
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.datasets import Dataset
    from kiln.engine.bench.serving import Point
    from kiln.engine.text.tokenizer import Tokenizer

CONCURRENCY = 16
_DATASETS = "data sets"  # title in --help
_ALIASES = {"prefix": "prefix_repetition"}


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server, when requests are sent, and what they hold."""
    load = parser.add_argument_group("load")
    load.add_argument("--url", help="measure this server; default: one of MODEL, on a free port")
    load.add_argument("--api-key", metavar="KEY", help="API key of the server at --url")
    load.add_argument(
        "--backend",
        choices=("openai", "openai-chat"),
        default="openai",
        help="openai: /v1/completions; openai-chat: /v1/chat/completions; default openai",
    )
    load.add_argument(
        "--num-prompts",
        type=_num_prompts,
        default=(128,),
        metavar="LIST",
        help="requests, or one number for each rate or concurrency; default 128",
    )
    load.add_argument(
        "--max-concurrency",
        type=counts,
        metavar="LIST",
        help=f"requests under way, or several such numbers, one after another; default "
        f"{CONCURRENCY}, with --request-rate no limit",
    )
    load.add_argument(
        "--request-rate",
        type=rates,
        metavar="LIST",
        help="requests that arrive per second, at random times, or several rates; inf: all at "
        "once; default: each as soon as another ends",
    )
    load.add_argument(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="B",
        help="gamma shape of the times between requests; below 1: bursts; default 1, a Poisson "
        "process",
    )
    load.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "prefix_repetition", *_ALIASES),
        default="random",
        help="what requests hold; prefix: prefix_repetition; default random",
    )
    load.add_argument("--dataset-path", type=Path, metavar="FILE", help="of sharegpt: its JSON")
    load.add_argument(
        "--metric-percentiles", type=percentiles, default=(99.0,), metavar="LIST",
        help="percentiles of every latency; default 99",
    )  # fmt: skip
    load.add_argument(
        "--goodput", type=goals, metavar="LIST",
        help="count requests that meet all of these, in ms, such as ttft:500,tpot:50,e2el:9000",
    )  # fmt: skip
    if isinstance(parser, KilnParser):
        parser.folded[_DATASETS] = ""
    _add_lengths(parser.add_argument_group(_DATASETS))


def _count_or_none(text: str) -> int:
    return count(text, 0)


def _num_prompts(text: str) -> tuple[int, ...]:
    return tuple(count(part.strip()) for part in text.split(","))


def _add_lengths(data: argparse._ArgumentGroup) -> None:
    numbers = {
        "random-input-len": (1024, "tokens of a prompt, without the prefix"),
        "random-output-len": (128, "tokens of an answer"),
        "random-prefix-len": (0, "tokens with which every prompt begins"),
        "prefix-repetition-prefix-len": (256, "tokens of each prefix"),
        "prefix-repetition-suffix-len": (256, "tokens behind it"),
        "prefix-repetition-num-prefixes": (10, "how many prefixes"),
        "prefix-repetition-output-len": (128, "tokens of an answer"),
    }
    for name, (default, meaning) in numbers.items():
        data.add_argument(
            f"--{name}",
            type=count if default else _count_or_none,
            default=default,
            metavar="N",
            help=f"{meaning}; default {default}",
        )
    data.add_argument(
        "--random-range-ratio", type=share, default=0.0, metavar="R",
        help="lengths are uniform between (1 - R) and (1 + R) times the given ones; default 0",
    )  # fmt: skip
    data.add_argument(
        "--sharegpt-output-len", type=count, metavar="N",
        help="tokens of every answer; default: as many as the recorded one has",
    )  # fmt: skip


def points_of(args: argparse.Namespace) -> list[Point]:
    """Return the runs of the load. Raises ConfigError if both flags have several values."""
    from kiln.engine.bench.arrivals import Arrivals
    from kiln.engine.bench.serving import Point

    limits: Sequence[int | None] = args.max_concurrency or (None,)
    given: Sequence[float] = args.request_rate or (math.inf,)
    if args.max_concurrency is None and args.request_rate is None:
        limits = (CONCURRENCY,)
    if len(limits) > 1 and len(given) > 1:
        raise ConfigError("--request-rate and --max-concurrency: give several values to one only")
    arrivals = [
        Arrivals(limit, None if math.isinf(rate) else rate, args.burstiness)
        for limit in limits
        for rate in given
    ]
    numbers = args.num_prompts * (len(arrivals) if len(args.num_prompts) == 1 else 1)
    if len(numbers) != len(arrivals):
        raise ConfigError(
            f"--num-prompts has {len(numbers)} numbers for {len(arrivals)} rates or concurrencies"
        )
    return [Point(each, number) for each, number in zip(arrivals, numbers, strict=True)]


def dataset_name(args: argparse.Namespace) -> str:
    """Return vLLM's name of the data set."""
    return str(_ALIASES.get(args.dataset_name, args.dataset_name))


def dataset_of(args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None) -> Dataset:
    """Return the data set. Raises ConfigError."""
    from kiln.engine.bench.datasets import PrefixRepetition, RandomTokens, ShareGPT
    from kiln.engine.bench.sharegpt import read_turns

    name = dataset_name(args)
    if args.dataset_path is not None and name != "sharegpt":
        raise ConfigError(f"--dataset-path: {name} reads no file; use --dataset-name sharegpt")
    if name == "random":
        return RandomTokens(
            vocab_size, args.random_input_len, args.random_output_len,
            args.random_range_ratio, args.random_prefix_len,
        )  # fmt: skip
    if name == "prefix_repetition":
        return PrefixRepetition(
            vocab_size, args.prefix_repetition_prefix_len, args.prefix_repetition_suffix_len,
            args.prefix_repetition_num_prefixes, args.prefix_repetition_output_len,
        )  # fmt: skip
    if args.dataset_path is None:
        raise ConfigError("--dataset-name sharegpt: give the file with --dataset-path")
    if tokenizer is None:
        raise ConfigError("--dataset-name sharegpt: MODEL has no tokenizer to count tokens with")
    turns = read_turns(args.dataset_path, lambda text: len(tokenizer.encode(text)))
    found = ShareGPT.of(turns, args.sharegpt_output_len)
    if not found.turns:
        raise ConfigError(
            f"--dataset-path {args.dataset_path}: none of its {len(turns)} conversations has a "
            "question of 4 to 1024 tokens, an answer of at least 4, and at most 2048 in all"
        )
    return found
