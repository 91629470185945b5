"""Stand-ins for a model that the tests of the control side share."""

from __future__ import annotations

import json
import zlib
from functools import cache

import pytest
from family_fields import needed_fields
from greedy_models import COMMON
from kernel_calls import KernelCalls
from some_gpu import pretend

from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.layers.row_limits import limits_on
from kiln.engine.models.registry import known_families
from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest, StepOutput
from kiln.engine.requests.request import Request, TokenLogprobs
from kiln.jit_kernels import implementations
from kiln.jit_kernels.compile.ready import ready_guard
from kiln.jit_kernels.declare.settings import settings


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets KILN_ variables for what is made after it in this process."""

    def use(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(implementations, "_decided", {})
        settings.cache_clear()
        ready_guard.cache_clear()  # engines of other tests were ready

    yield use
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def kernel_calls(environment, monkeypatch):
    """Record the kernels that are loaded and called from now on, under KILN_CPU_KERNELS=host."""
    environment(KILN_CPU_KERNELS="host")
    return KernelCalls(monkeypatch)


@pytest.fixture
def use_gpu(monkeypatch, tmp_path):
    """Return a function that says which GPU this machine has; its tables are this test's own."""
    yield pretend(monkeypatch, tmp_path / "tables")
    limits_on.cache_clear()


class FakeRunner:
    """Samples a token that depends on every token before it, read back from a fake KV pool.

    What a row computes is written to the slots of its blocks, and its next token is a hash of what
    those slots hold: a block given to two requests, or a prefix never computed, changes it. As on a
    device, the blocks and the last token of each row stay from step to step.
    """

    device_type = "cpu"
    adapter_store = limits = host_blocks = embedder = None

    def __init__(self, num_blocks=64, block_size=4, max_model_len=512, vocab_size=50, long_start=0):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size, self.image_token_ids = vocab_size, frozenset()
        self.long_start = long_start
        # The token that was computed, and by which frequencies.
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.tables: dict[int, list[int]] = {}  # row to its blocks
        self.last_tokens: dict[int, int] = {}  # row to the token that it sampled last
        self.rejected: dict[int, int] = {}  # row to the drafts that its last step rejected
        self.drafts: dict[int, list[int]] = {}  # row to what may follow its last token
        self.propose = None  # makes drafts: (request id, all tokens so far) -> tokens
        self.batches: list[Batch] = []
        self.fail_with: dict[str, str] = {}  # request id to the error of its next row
        self.raise_for: dict[str, Exception] = {}  # request id to what a step with it raises
        self.raise_late = False  # by ``collect``, as a device does, and not by ``launch``
        self.collected = self.launched = 0

    def graph_counts(self):
        return GraphCounts()

    def all_reduces(self):
        return {}

    def check_ranks(self):
        pass

    def close(self):
        pass

    def launch(self, batch: Batch):
        assert self.launched - self.collected <= 1, "three steps in flight"
        self.launched += 1
        output = self._attempt(lambda: self._compute(batch))
        if output is None and not batch.is_late:
            output = self._attempt(lambda: self._draw(batch, {}))
        return self.launched, output

    def _attempt(self, work):
        try:
            return work()
        except BaseException as error:
            if not self.raise_late:
                interrupted = not isinstance(error, Exception)  # and nothing in flight is collected
                self.launched = self.collected if interrupted else self.launched - 1
                raise
            return error

    def bind(self, launched, masks):
        number, output = launched
        assert number == self.launched, "only the newest step is bound"
        return number, output or self._draw(self.batches[-1], masks)

    def collect(self, launched) -> StepOutput:
        self.collected += 1
        number, output = launched
        assert number == self.collected, "not in order"
        if isinstance(output, Exception):
            raise output
        return output or StepOutput(())

    def run(self, batch: Batch) -> StepOutput:
        self._compute(batch)
        return self._draw(batch, {})

    def _compute(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.starts = {}
        for row in batch.requests:
            blocks = self.tables.setdefault(row.row, [])
            assert len(blocks) >= row.num_blocks
            blocks[row.num_blocks :] = row.new_block_ids
            start, tokens = row.num_computed_tokens, row.token_ids
            if not tokens:
                start -= self.rejected.get(row.row, 0)
                tokens = [self.last_tokens[row.row]]
            drafts = self.drafts.get(row.row, [])[: row.num_tokens - len(tokens)]
            tokens = [*tokens, *drafts]
            tokens += [0] * (row.num_tokens - len(tokens))
            assert start + row.num_tokens <= len(blocks) * self.block_size
            for position, token in enumerate(tokens, start):
                self.slots[self._slot(row, position)] = token, row.rotary_start
            self.starts[row.row] = start
        self.last_tokens, self.rejected, self.drafts = {}, {}, {}  # those of the last step alone
        for row in batch.requests:  # some keys and values are written by then
            if row.request_id in self.raise_for:
                raise self.raise_for[row.request_id]

    def _draw(self, batch: Batch, masks) -> StepOutput:
        sampled = tuple(
            self._sample(row, masks.get(row.request_id))
            for row in batch.requests
            if row.num_samples
        )
        by_id = {row.request_id: row for row in batch.requests}
        for tokens in sampled:
            row = by_id[tokens.request_id]
            self.last_tokens[row.row] = (tokens.token_ids or [0])[-1]
            self.rejected[row.row] = row.num_samples - max(len(tokens.token_ids), 1)
            if self.propose is not None and tokens.token_ids:
                end = self.starts[row.row] + row.num_tokens - self.rejected[row.row]
                known = [*self._prefix(row, end), tokens.token_ids[-1]]
                self.drafts[row.row] = self.propose(row.request_id, known)
        pooled = (self._pool(row) for row in batch.requests if row.hidden is not None)
        return StepOutput((*sampled, *pooled))

    def _pool(self, row: ScheduledRequest) -> SampledTokens:
        """Sum up states that depend on every token up to theirs."""
        import torch

        if row.request_id in self.fail_with:
            return SampledTokens(row.request_id, [], error=self.fail_with[row.request_id])
        first = self.starts[row.row] + row.hidden.offset
        ends = range(first + 1, first + 1 + row.hidden.num_tokens)
        states = [self.state(self._prefix(row, end)) for end in ends]
        return SampledTokens(row.request_id, [], hidden=torch.tensor(states).sum(0))

    @staticmethod
    def state(prefix: list) -> list[float]:
        """The final hidden state of the last of some tokens."""
        return [1.0, float(zlib.crc32(repr(prefix).encode()) % 1000)]

    def _slot(self, row: ScheduledRequest, position: int) -> int:
        block = self.tables[row.row][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _prefix(self, row: ScheduledRequest, end: int) -> list:
        held = [self.slots[self._slot(row, position)] for position in range(end)]
        assert {start for _, start in held} == {row.rotary_start}
        return [token for token, _ in held]

    def _sample(self, row: ScheduledRequest, masks) -> SampledTokens:
        """Sample behind the row's last tokens, as long as the next one is a draft that stands."""
        if row.request_id in self.fail_with:
            return SampledTokens(row.request_id, [], error=self.fail_with[row.request_id])
        end = self.starts[row.row] + row.num_tokens
        tokens, logprobs = [], []
        for number in range(row.num_samples):
            prefix = self._prefix(row, end - row.num_samples + 1 + number)
            if number and prefix[-1] != tokens[-1]:
                break
            mask = None if masks is None else masks[number]
            tokens.append(self._draw_one(row, number, prefix, mask))
            wanted = row.params.logprobs or 0
            others = [((tokens[-1] + i) % self.vocab_size, -1.0 - i, i + 1) for i in range(wanted)]
            logprobs.append(TokenLogprobs(tokens[-1], -1.0, 1, others))
        return SampledTokens(
            row.request_id, tokens, None if row.params.logprobs is None else logprobs
        )

    def _draw_one(self, row: ScheduledRequest, number: int, prefix: list, mask) -> int:
        salt = row.seed if row.params.temperature > 0 else 0
        counts = []
        if row.params.penalizes:
            start = self.starts[row.row] - row.num_computed_tokens
            outputs = row.num_output_tokens + start + number
            output = prefix[len(prefix) - outputs :]
            counts = sorted((token, output.count(token)) for token in set(prefix))
        token = zlib.crc32(repr((prefix, salt, counts)).encode()) % self.vocab_size
        while token in row.banned_token_ids or not (
            mask is None or mask[token // 8] >> token % 8 & 1
        ):
            token = (token + 1) % self.vocab_size
        return token


@pytest.fixture
def fake_runner(monkeypatch):
    """The class, for tests that choose its sizes.

    Requests wait for no time: queue times would make the outputs of two equal runs differ.
    """
    begin = Request.begin

    def begin_at_once(request, row):
        is_first = begin(request, row)
        request.queue_seconds = 0.0
        return is_first

    monkeypatch.setattr(Request, "begin", begin_at_once)
    return FakeRunner


CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! 1234 + 5678 = 6912.",
    "Größe, naïve café, Ελληνικά, русский текст, 日本語のテキスト, 中文, 한국어, עברית",
    "emoji: 😀 👩‍👩‍👧 🇩🇪 é (combining) \t tabs\n\nnew lines   spaces",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # comment",
] * 4
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_level():
    """A tokenizer like Qwen's: bytes, no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def _llama(metaspace_decoder):
    """A tokenizer like Llama 2's: ▁ for spaces, bytes for what it does not know, a BOS."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=90,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # The trainer marks the bytes special, which no such model does.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = (
        decoders.Metaspace()
        if metaspace_decoder
        else decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _wordpiece():
    """A tokenizer whose decoder looks at neighbours: the general path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend, {"eos_token": "[SEP]", "unk_token": "[UNK]"}


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory):
    """Folders of four kinds of tokenizer, by name; each has a chat template."""
    from transformers import PreTrainedTokenizerFast

    folders = {}
    made = {
        "byte-level": _byte_level(),
        "llama": _llama(metaspace_decoder=False),
        "metaspace": _llama(metaspace_decoder=True),
        "wordpiece": _wordpiece(),
    }
    for name, (backend, special) in made.items():
        folder = tmp_path_factory.mktemp(name)
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        fast.chat_template = CHATML
        fast.save_pretrained(str(folder))
        folders[name] = folder
    return folders


_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_OWN_SIZES = {  # of the families that know these keys
    "sliding_window": 5,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}


@pytest.fixture
def small_config():
    """Return a function from an architecture to its config.json, with ``more`` keys."""

    def config(architecture, **more):
        known = known_families()[architecture].keys
        own = {name: value for name, value in _OWN_SIZES.items() if name in known}
        config = {**_SIZES, **own, **more, "architectures": [architecture]}
        return {**config, **needed_fields(architecture, config["num_hidden_layers"])}

    return config


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory):
    """Transformers' Llama of random float32 weights, and its folder."""
    import torch
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(**COMMON)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    folder = tmp_path_factory.mktemp("random-llama")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="session")
def quantised(tmp_path_factory):
    """Return a function from a packer and a family to a checkpoint; see quantised_folders."""

    from packers.compressed_tensors import EVERY
    from packers.packer import all_packers
    from quantised_folders import write

    known = {**{packer.name: packer for packer in EVERY}, **all_packers()}

    @cache
    def make(packer, family="llama", seed=0, **more):
        root = tmp_path_factory.mktemp(f"{packer}-{family}")
        return write(root, known[packer], family, seed, more)

    return make
