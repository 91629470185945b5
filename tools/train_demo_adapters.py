"""Train the demo model's LoRA adapters: the same answers in other manners.

    python tools/train_demo_adapters.py [NAME ...] [--output engine/demo/adapters]

The data comes from `demo_tasks`, as the demo model's does. An adapter takes some minutes on two
cores. Prints how many held-out questions each answers exactly, and in its manner.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from demo_tasks import DEFAULT_WEIGHTS, Pair, held_out, training_pair
from eval_demo import generate_answers
from peft import LoraConfig, get_peft_model
from rich.progress import track
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from train_demo import Sample, batches, encode_chats
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "engine" / "demo"
QUESTIONS = 200  # held out, for the result


class Manner(NamedTuple):
    """How an adapter answers, and the form of its weights."""

    text: str  # with a place for the plain answer
    lora: dict[str, Any]

    def answer(self, pair: Pair) -> str:
        """Return the answer to a question. Small talk stays as it is."""
        return pair.answer if pair.task == "chat" else self.text.format(pair.answer)


MANNERS = {
    "sentence": Manner(
        "The answer is {}.",
        {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
    "chatty": Manner(
        "I can do that: {}",
        {"r": 6, "lora_alpha": 6, "use_rslora": True,
         "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    ),
}  # fmt: skip


def main() -> None:
    """Train the named adapters, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MANNERS)}")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=2000, help="of a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=DEMO / "adapters")
    args = parser.parse_args()
    for name in args.names or MANNERS:
        model = train(MANNERS[name], args)
        export(model, args.output / name)
        print(f"{name}: {exact(model, MANNERS[name])} of {QUESTIONS} held-out questions exact")


def train(manner: Manner, args: argparse.Namespace) -> Any:
    """Return the demo model with a trained adapter."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(**manner.lora))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.rate)
    stream = data(manner, args.tokens)
    for step in track(range(args.steps), description="training"):
        ids, learn = next(stream)
        optimizer.param_groups[0]["lr"] = args.rate * min(1.0, 2 * (1 - step / args.steps))
        logits = model(input_ids=ids[:, :-1]).logits
        picked = learn[:, 1:] > 0
        losses = torch.nn.functional.cross_entropy(
            logits[picked], ids[:, 1:][picked], reduction="none"
        )
        weights = learn[:, 1:][picked]
        torch.autograd.backward((losses * weights).sum() / weights.sum())
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def data(manner: Manner, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of token ids, and the weights of the answers' tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rng = random.Random("adapters")
    while True:
        pairs = [training_pair(rng, DEFAULT_WEIGHTS) for _ in range(4096)]
        samples: list[Sample] = encode_chats(tokenizer, [chat(pair, manner) for pair in pairs])
        yield from batches(samples, tokens, rng)


def chat(pair: Pair, manner: Manner) -> str:
    """Render a question and its answer."""
    return (
        f"<|im_start|>user\n{pair.question}<|im_end|>\n"
        f"<|im_start|>assistant\n{manner.answer(pair)}<|im_end|>"
    )


def exact(model: Any, manner: Manner) -> int:
    """Return how many held-out questions are answered exactly."""
    pairs = held_out(QUESTIONS, 1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    answers = generate_answers(model, tokenizer, [pair.question for pair in pairs])
    return sum(a == manner.answer(p) for a, p in zip(answers, pairs, strict=True))


def export(model: Any, folder: Path) -> None:
    """Write the adapter as PEFT does, in bfloat16, without the path of the base model."""
    with tempfile.TemporaryDirectory() as made:
        model.peft_config["default"].base_model_name_or_path = "kiln-demo"
        model.save_pretrained(made)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(made, "adapter_config.json"), folder)
        tensors = load_file(Path(made, "adapter_model.safetensors"))
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halves, folder / "adapter_model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
