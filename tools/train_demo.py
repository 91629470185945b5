"""Train the demo model from scratch: tokenizer, weights and the folder that Kiln ships.

All training data comes from `demo_tasks`; nothing is downloaded.  Checkpoints go to --work-dir,
and a run that finds one there continues it, so an interrupted training loses a few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from demo_tasks import DEFAULT_WEIGHTS, TASKS, held_out, training_pair
from eval_demo import generate_answers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 768
CONTEXT = 2048
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Kiln.",
    "You are a tiny demo model. Answer exactly.",
    "Answer briefly.",
)
# Digits and letters inside a quoted word are single tokens: arithmetic and spelling tasks then see
# single characters, while the words of the question stay whole tokens.
SPLIT_PATTERN = r'\p{L}(?=\p{L}*")|\p{N}|, (?=\p{N})| ?"|\p{L}+\n| ?\p{L}+| ?[^\s\p{L}\p{N}"]+|\s'
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act"),
    *("rms_norm_eps", "attention_bias", "attention_dropout", "initializer_range"),
    *("tie_word_embeddings", "use_cache"),
)
_POOL = 8192
_DEV_COUNT = 256
_DEV_SEED = 20_000


class Sample(NamedTuple):
    """One rendered chat: token ids, and for each whether it is an answer to learn."""

    ids: list[int]
    learn: list[bool]


def random_chat(rng: random.Random, weights: dict[str, float]) -> str:
    """Render a chat of one or, rarely, two turns, sometimes with a system message."""
    text = ""
    if rng.random() < 0.08:
        text += f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n"
    for _ in range(2 if rng.random() < 0.06 else 1):
        pair = training_pair(rng, weights)
        text += f"<|im_start|>user\n{pair.question}<|im_end|>\n"
        text += f"<|im_start|>assistant\n{pair.answer}<|im_end|>\n"
    # The model stops at the last <|im_end|>, so the newline after it is never predicted.
    return text[:-1]


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE on generated chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(f"{seed}-tokenizer")
    even = dict.fromkeys(TASKS, 1.0)
    texts = [random_chat(rng, even) for _ in range(20_000)]
    for special in SPECIALS:
        texts = [text.replace(special, "\x00") for text in texts]
    # Remove special tokens: BPE must not learn merges from the text of the markers themselves.
    tokenizer.train_from_iterator((part for text in texts for part in text.split("\x00")), trainer)
    return tokenizer


def encode_chats(tokenizer: Tokenizer, texts: list[str]) -> list[Sample]:
    """Tokenize chats and mark the answers, each with the <|im_end|> that closes it."""
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    end = tokenizer.token_to_id("<|im_end|>")
    samples = []
    for encoding in tokenizer.encode_batch(texts):
        ids = encoding.ids
        learn = [False] * len(ids)
        inside = False
        for index, token in enumerate(ids):
            learn[index] = inside
            if inside:
                inside = token != end
            else:
                inside = ids[max(0, index + 1 - len(header)) : index + 1] == header
        samples.append(Sample(ids, learn))
    return samples


def batches(
    samples: list[Sample], tokens: int, rng: random.Random
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Group chats of similar length into right-padded batches of about `tokens` tokens."""
    # The noise mixes tasks within a batch, at the price of a little padding.
    ordered = sorted(samples, key=lambda sample: len(sample.ids) + 5 * rng.random())
    result = []
    while ordered:
        width = len(ordered[-1].ids)
        chunk = ordered[-max(1, tokens // width) :]
        del ordered[-len(chunk) :]
        width = max(len(sample.ids) for sample in chunk)
        ids = torch.zeros((len(chunk), width), dtype=torch.long)
        learn = torch.zeros((len(chunk), width))
        for row, sample in enumerate(chunk):
            ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
            # Without this weight, long answers would dominate the loss, and answers of one token,
            # such as counts, would be learned badly.
            weight = sum(sample.learn) ** -0.5
            learn[row, : len(sample.ids)] = weight * torch.tensor(sample.learn)
        result.append((ids, learn))
    rng.shuffle(result)
    return result


def new_model(tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Build the untrained model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    # The fused CPU attention has a slow backward pass; for 30 tokens plain attention is faster.
    config._attn_implementation = "eager"
    return Qwen3ForCausalLM(config)


def batch_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, learn: torch.Tensor) -> torch.Tensor:
    """Weighted cross-entropy of answer tokens; padding is on the right, so needs no mask."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        picked = learn[:, 1:] > 0
        logits = model.lm_head(hidden[picked])
    weights = learn[:, 1:][picked]
    targets = ids[:, 1:][picked]
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def make_optimizers(model: Qwen3ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adam]


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate's factor: warm up, hold, then decay linearly over the last half."""
    return min(1.0, (step + 1) / 150, max(0.0, (steps - step) / (0.5 * steps)))


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer the way transformers loads it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def dev_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Exact answers per task, on questions that are neither in training nor in the default test."""
    pairs = held_out(_DEV_COUNT, _DEV_SEED)
    model.eval()
    answers = generate_answers(model, tokenizer, [pair.question for pair in pairs])
    model.train()
    score = {}
    for task in TASKS:
        hits = [a == p.answer for a, p in zip(answers, pairs, strict=True) if p.task == task]
        score[task] = sum(hits) / len(hits)
    return score


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model folder that Kiln ships; its JSON files also work with transformers 4."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{key: getattr(model.config, key) for key in CONFIG_KEYS},
        # Both spellings of the rotary base: transformers 5 reads the second one.
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "use_sliding_window": False,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }
    _write_json(folder / "config.json", config)
    generation = {"do_sample": False, "eos_token_id": [eos, pad], "pad_token_id": pad}
    _write_json(folder / "generation_config.json", generation)
    added = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, **added, "special": True}
            for token in SPECIALS
        },
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


class Trainer:
    """The training loop with its checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Start fresh, or from the checkpoint in the work folder."""
        self.args = args
        self.tokenizer = self._saved_tokenizer()
        self.chat_tokenizer = wrap_tokenizer(self.tokenizer)
        self.model = new_model(self.tokenizer, args.seed)
        self.optimizers = make_optimizers(self.model, args.rate)
        self.weights = dict(DEFAULT_WEIGHTS)
        self.step = 0
        self.pool = 0
        self.seconds = 0.0
        self.checkpoint = Path(args.work_dir) / "checkpoint.pt"
        if self.checkpoint.exists():
            self._load()

    def _saved_tokenizer(self) -> Tokenizer:
        # Kept with the checkpoint: the weights are worth nothing with any other vocabulary.
        path = Path(self.args.work_dir) / "tokenizer.json"
        if not path.exists():
            train_tokenizer(self.args.seed).save(str(path))
        return Tokenizer.from_file(str(path))

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.weights = state["weights"]
        self.step, self.pool, self.seconds = state["step"], state["pool"], state["seconds"]

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "weights": self.weights,
            "step": self.step,
            "pool": self.pool,
            "seconds": self.seconds,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _stream(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            rng = random.Random(f"{self.args.seed}-pool-{self.pool}")
            self.pool += 1
            texts = [random_chat(rng, self.weights) for _ in range(_POOL)]
            yield from batches(encode_chats(self.tokenizer, texts), self.args.tokens, rng)

    def _one_step(self, ids: torch.Tensor, learn: torch.Tensor) -> float:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.args.rate * rate_factor(self.step, self.args.steps)
        loss = batch_loss(self.model, ids, learn)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def _check(self, progress: Progress, loss: float) -> None:
        score = dev_accuracy(self.model, self.chat_tokenizer)
        # Tasks that still fail get more of the data; those that are done keep a share.
        self.weights = {t: DEFAULT_WEIGHTS[t] * min(2.0, 0.4 + 6 * (1 - score[t])) for t in TASKS}
        line = " ".join(f"{task} {100 * value:.0f}" for task, value in score.items())
        mean = 100 * sum(score.values()) / len(score)
        progress.console.print(
            f"step {self.step} {self.seconds:.0f}s loss {loss:.4f} mean {mean:.1f}: {line}",
            highlight=False,
        )
        self._save()

    def run(self) -> None:
        """Train up to the wanted step, checking and saving on the way, then export."""
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        average = 0.0
        with Progress(*columns) as progress:
            bar = progress.add_task("", total=self.args.steps, completed=self.step)
            stream = self._stream()
            while self.step < self.args.steps:
                started = time.monotonic()
                loss = self._one_step(*next(stream))
                self.seconds += time.monotonic() - started
                average = 0.98 * average + 0.02 * loss if average else loss
                progress.update(bar, completed=self.step, description=f"loss {average:.4f}")
                if self.step % self.args.check_every == 0 or self.step == self.args.steps:
                    self._check(progress, average)
        export(self.model, self.tokenizer, Path(self.args.output))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write the output folder."""
    parser = argparse.ArgumentParser(description="Train Kiln's demo model from scratch.")
    parser.add_argument("--output", default="engine/demo", help="folder to write")
    parser.add_argument("--work-dir", help="folder for checkpoints (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=5500)
    parser.add_argument("--tokens", type=int, default=3072, help="tokens per batch")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--check-every", type=int, default=250, help="steps between checks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.work_dir is None:
        args.work_dir = str(Path(tempfile.gettempdir()) / "kiln-train-demo")
    Path(args.work_dir).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    trainer = Trainer(args)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{count} parameters, work folder {args.work_dir}")
    trainer.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
