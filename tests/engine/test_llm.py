"""The offline API, over a fake model and a real tokenizer."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from kiln.engine import core as core_module
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.errors import ConfigError, ModelError, QueueFullError, RequestError
from kiln.engine.llm import LLM
from kiln.engine.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def runner(fake_runner, monkeypatch):
    made = fake_runner(num_blocks=128, vocab_size=400)
    monkeypatch.setattr(core_module, "load_runner", lambda config, progress: made)
    return made


@pytest.fixture
def llm(runner, tokenizer_folders):
    return LLM(str(tokenizer_folders["byte-level"]), block_size=4)


def is_idle(llm):
    llm.core.scheduler.kv.pool.check_integrity()
    return not llm.core.has_work and llm.core.stats().kv_blocks_used == 0


def only(outputs):
    (output,) = outputs
    (completion,) = output.outputs
    return completion


def test_every_form_of_a_prompt_is_the_same_prompt(llm):
    ids = llm.tokenizer.encode("Hello, world")
    forms = ["Hello, world", {"prompt": "Hello, world"}, ids, tuple(ids), {"prompt_token_ids": ids}]
    forms.append(numpy.array(ids))
    outputs = llm.generate(forms, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 6
    assert [output.prompt for output in outputs] == ["Hello, world"] * 2 + [None] * 4
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    for form in forms[:5]:
        assert only(llm.generate(form, GREEDY)).token_ids == outputs[0].outputs[0].token_ids


def test_results_come_in_the_order_of_the_prompts_whatever_ends_first(llm):
    prompts = [[index, 1, 2] for index in range(20)]
    params = [GREEDY.replace(max_tokens=20 - index) for index in range(20)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(20, 0, -1))
    assert [int(output.request_id) for output in outputs] == list(range(20))
    assert all(output.finished for output in outputs)
    assert is_idle(llm)


def test_the_text_is_what_the_tokens_decode_to(llm):
    completion = only(llm.generate("Hello", GREEDY))
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.finish_reason == "length"
    assert completion.logprobs is None


def test_vllms_defaults_apply_when_no_settings_are_given(llm, runner):
    completion = only(llm.generate("Hello"))
    assert len(completion.token_ids) <= 16
    assert runner.batches[0].requests[0].params == SamplingParams()


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(llm, runner):
    whole = only(llm.generate("Hello", GREEDY))
    stop = whole.text[3:5]
    steps = len(runner.batches)
    completion = only(llm.generate("Hello", GREEDY.replace(stop=[stop])))
    assert completion.text == whole.text[: whole.text.find(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < len(whole.token_ids)
    assert len(runner.batches) - steps <= len(completion.token_ids) + 1  # one step is ahead
    assert is_idle(llm)
    params = GREEDY.replace(stop=[stop], include_stop_str_in_output=True)
    included = only(llm.generate("Hello", params))
    assert included.text == whole.text[: whole.text.find(stop) + len(stop)]


def test_a_stop_token_is_in_the_tokens_and_not_in_the_text(llm):
    whole = only(llm.generate("Hello", GREEDY))
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    completion = only(llm.generate("Hello", GREEDY.replace(stop_token_ids=[stop])))
    assert completion.token_ids == whole.token_ids[: first + 1]
    assert completion.text == llm.tokenizer.decode(whole.token_ids[:first])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_the_models_own_end_token_stops_with_no_reason_given(llm, runner):
    (end,) = llm.tokenizer.eos_token_ids
    runner.vocab_size = end + 1  # three tokens to draw from: the end comes soon
    completion = only(llm.generate([1], SamplingParams(temperature=0, max_tokens=100)))
    assert completion.token_ids[-1] == end
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert len(completion.token_ids) < 100


@pytest.mark.parametrize("seed", [10, -2])
def test_n_answers_differ_and_their_seeds_follow_each_other(llm, seed):
    params = SamplingParams(n=3, seed=seed, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([[1, 2]], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    answers = [completion.token_ids for completion in output.outputs]
    assert len({tuple(answer) for answer in answers}) == 3
    for index, answer in enumerate(answers):
        single = SamplingParams(seed=seed + index, max_tokens=6, ignore_eos=True)
        assert only(llm.generate([[1, 2]], single)).token_ids == answer


def test_the_same_seed_is_used_for_each_prompt(llm):
    params = SamplingParams(n=2, seed=7, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([[1, 2], [3], [1, 2]], params)
    assert [[one.seed for one in output.outputs] for output in outputs] == [[7, 8]] * 3
    first, _, again = ([one.token_ids for one in output.outputs] for output in outputs)
    assert first == again


def test_a_seedless_batch_is_reproducible_in_a_new_engine(runner, tokenizer_folders):
    def answers(seed):
        llm = LLM(str(tokenizer_folders["byte-level"]), block_size=4, seed=seed)
        params = SamplingParams(n=2, max_tokens=5, ignore_eos=True)
        outputs = llm.generate([[1, 2], [3]], params)
        return [answer.token_ids for output in outputs for answer in output.outputs]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_logprobs_hold_the_drawn_token_and_the_likeliest_with_their_text(llm):
    completion = only(llm.generate("Hello", GREEDY.replace(logprobs=2)))
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 12
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert (len(entry), entry[token].rank) == (2, 1)
        assert all(each.decoded_token == llm.tokenizer.token_text(id) for id, each in entry.items())
    chosen_alone = only(llm.generate("Hello", GREEDY.replace(logprobs=0))).logprobs
    assert chosen_alone is not None
    assert all(len(entry) == 1 for entry in chosen_alone)


def test_a_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.tokenizer.apply_chat_template(messages)
    outputs = llm.chat([messages, messages], GREEDY)
    assert [each.outputs[0].token_ids for each in outputs] == [output.outputs[0].token_ids] * 2
    (plain,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert output.prompt.startswith(plain.prompt)
    assert plain.prompt.endswith("<|im_end|>\n")


def test_an_error_of_one_answer_is_its_own(llm, runner):
    runner.fail_with["0-0"] = "the logits hold NaN"
    bad, good = llm.generate([[1], [2]], GREEDY)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error) == ("error", "the logits hold NaN")
    assert (good.outputs[0].finish_reason, good.outputs[0].error) == ("length", None)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], []], GREEDY, "prompt 1: the prompt is empty"),
        ([[1], [400]], GREEDY, "prompt 1: prompt has token id 400"),
        ([[1] * 600], GREEDY, "prompt 0: This model's maximum context length is 512 tokens"),
        ([[1], "fine", 5], GREEDY, "prompt 2 is '5'"),
        ([[1], [1.5]], GREEDY, r"prompt 1 is '\[1.5\]'"),
        ([["a"]], GREEDY, "must be a text or a list of token ids"),
        ([None], GREEDY, "prompt 0 is 'None'"),
        (5, GREEDY, "prompts is a int"),
        ([{"text": "x"}], GREEDY, r"prompt 0 has the keys \['text'\]"),
        ([{"prompt": "x", "prompt_token_ids": [1]}], GREEDY, "give one of"),
        ([[1], [2]], [GREEDY], "1 sampling_params, 2 prompts"),
        ([[1]], {"temperature": 0}, "must be SamplingParams"),
        ([[1], [2]], [GREEDY, GREEDY.replace(stop_token_ids=[999])], "prompt 1: stop_token_ids"),
    ],
)
def test_a_batch_with_one_bad_request_is_refused_whole(llm, runner, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert runner.batches == []
    assert is_idle(llm)


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == []


def test_an_interrupted_batch_leaves_nothing_behind(llm, runner):
    works, steps = runner._compute, iter(range(3))

    def interrupted(batch):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return works(batch)

    runner._compute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3]], GREEDY)
    assert is_idle(llm)
    runner._compute = works
    assert len(only(llm.generate([[1]], GREEDY)).token_ids) == 12


def test_more_prompts_than_a_server_would_queue_are_taken(llm):
    outputs = llm.generate([[1]] * 1500, GREEDY.replace(max_tokens=1))
    assert len(outputs) == 1500


def test_a_model_without_a_tokenizer_takes_token_ids_alone(runner, tmp_path):
    llm = LLM(str(tmp_path), block_size=4)
    completion = only(llm.generate([[1, 2]], GREEDY.replace(logprobs=1)))
    assert (len(completion.token_ids), completion.text) == (12, "")
    assert completion.logprobs is not None
    assert {entry.decoded_token for at in completion.logprobs for entry in at.values()} == {None}
    with pytest.raises(RequestError, match="no tokenizer: give token ids"):
        llm.generate(["text"])
    with pytest.raises(RequestError, match="no tokenizer: give token ids"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="stop needs a tokenizer: use stop_token_ids"):
        llm.generate([[1]], SamplingParams(stop="x"))


def test_bad_settings_are_named(tokenizer_folders, runner):
    model = str(tokenizer_folders["byte-level"])
    with pytest.raises(TypeError, match="gpu_memory"):
        LLM(model, gpu_memory=0.9)
    with pytest.raises(ConfigError, match="dtype='float8'"):
        LLM(model, dtype="float8")
    with pytest.raises(ModelError, match="no such folder"):
        LLM("/no/such/model")
    with pytest.raises(RequestError, match="with at least one"):
        LLM(model).chat([])


def test_an_answer_tells_the_seed_that_draws_it_again(llm):
    free = SamplingParams(max_tokens=8, ignore_eos=True, n=2)
    answers = llm.generate([[1, 2, 3]], free)[0].outputs
    assert answers[0].seed != answers[1].seed
    for answer in answers:
        again = only(llm.generate([[1, 2, 3]], free.replace(n=1, seed=answer.seed)))
        assert (again.token_ids, again.seed) == (answer.token_ids, answer.seed)


def test_a_bias_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(RequestError, match="logit_bias has token id 400") as caught:
        llm.generate([[1]], SamplingParams(logit_bias={400: 1.0}))
    assert caught.value.param == "logit_bias"


def test_without_a_tokenizer_ids_go_in_and_come_out(runner, tokenizer_folders):
    llm = LLM(str(tokenizer_folders["byte-level"]), block_size=4, skip_tokenizer_init=True)
    output = only(llm.generate([1, 2, 3], GREEDY))
    assert (len(output.token_ids), output.text) == (12, "")
    with pytest.raises(RequestError, match="no tokenizer: give token ids"):
        llm.generate("Hello", GREEDY)


def test_a_config_is_taken_whole(runner, tokenizer_folders):
    folder = str(tokenizer_folders["byte-level"])
    config = EngineConfig(
        ModelConfig(folder, seed=7),
        KVConfig(block_size=4),
        SchedulerConfig(max_num_seqs=2, max_waiting=3),
    )
    llm = LLM.from_config(config)
    assert llm.core.config == replace(config, scheduler=config.scheduler.for_device("cpu"))
    assert llm.tokenizer is not None
    with pytest.raises(QueueFullError, match="at most 3"):
        llm.generate([[1, 2]] * 6, GREEDY)
    assert is_idle(llm)
    assert len(llm.generate([[1, 2]] * 3, GREEDY)) == 3


def test_a_prompt_is_truncated_at_its_beginning(llm):
    long = list(range(1, 300)) * 2
    for most, kept in ((4, 4), (-1, 500)):  # 512 tokens of context less 12 of the answer
        params = GREEDY.replace(truncate_prompt_tokens=most)
        (output,) = llm.generate(long, params)
        assert output.prompt_token_ids == long[-kept:]
    (output,) = llm.generate("Hello " * 3000, GREEDY.replace(truncate_prompt_tokens=2))
    assert len(output.prompt_token_ids) == 2


def test_without_detokenization_the_tokens_are_the_same_and_the_text_is_empty(llm):
    text, ids = (only(llm.generate("Hello", GREEDY.replace(detokenize=d))) for d in (True, False))
    assert (ids.text, ids.token_ids) == ("", text.token_ids)
    assert text.text


def test_a_chat_may_have_another_template_and_continue_its_last_message(llm, tmp_path):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}]
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    (tmp_path / "other.jinja").write_text(source)
    for template in (source, str(tmp_path / "other.jinja")):
        options = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}}
        assert llm.chat(messages, GREEDY, **options)[0].prompt == "[2+2?][It is ]!"
        (output,) = llm.chat(messages, GREEDY, continue_final_message=True, **options)
        assert output.prompt == "[2+2?][It is "
        again = LLM(llm.core.config.model.model, chat_template=template)
        assert again.chat(messages, GREEDY)[0].prompt == "[2+2?][It is ]"
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        llm.chat(messages, GREEDY, chat_template="nowhere.jinja")


def test_a_chat_is_read_as_the_server_reads_it(llm):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    source = "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    prompt = llm.chat(messages, GREEDY, chat_template=source)[0].prompt
    assert prompt.startswith("hi[]")
    assert '"arguments": {"a": 1}' in prompt
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].type: is 'image_url'"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], GREEDY)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters: is not a JSON Schema"):
        llm.chat(messages[:1], GREEDY, tools=[tool])


@pytest.mark.parametrize("least", [0, 5])
def test_a_stop_string_that_is_a_special_token_ends_the_answer_after_min_tokens(llm, runner, least):
    whole = only(llm.generate("Hello", GREEDY.replace(max_tokens=40)))
    ids = {token: llm.tokenizer.backend.id_to_token(token) for token in (0, 1, 2)}
    stops = {text: token for token, text in ids.items()}
    runner.vocab_size = 3  # so that special tokens come at once
    params = GREEDY.replace(stop=["<|im_end|>", "no"], min_tokens=least, max_tokens=40)
    completion = only(llm.generate([0, 1], params))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "<|im_end|>")
    assert completion.token_ids.index(stops["<|im_end|>"]) == len(completion.token_ids) - 1
    assert len(completion.token_ids) > least
    assert len(whole.token_ids) == 40
    banned = [batch.requests[0].banned_token_ids for batch in runner.batches[-40:]]
    assert frozenset({stops["<|im_end|>"]}) in banned or not least
    assert is_idle(llm)


LONE = "a\ud83d"


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (
            lambda llm: llm.generate(["fine", LONE]),
            "prompt 1 has half of a surrogate pair, U\\+D83D",
        ),
        (lambda llm: llm.generate({"prompt": LONE}), "prompt 0 has half of a surrogate pair"),
        (
            lambda llm: llm.chat([[{"role": "user", "content": text}] for text in ("fine", LONE)]),
            "conversation 1 has half of a surrogate pair",
        ),
        (lambda llm: SamplingParams(stop=["x", LONE]), "a stop string has half .* at character 1"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_where_it_stands(llm, call, where):
    with pytest.raises(RequestError, match=where) as caught:
        call(llm)
    assert caught.value.param in ("prompt", "messages", "stop")
    assert is_idle(llm)


def test_min_tokens_with_every_token_banned_is_refused(llm, runner):
    runner.vocab_size = 5
    every = {"min_tokens": 2, "stop_token_ids": [0, 1, 3], "stop": ["<|im_end|>"]}
    params = GREEDY.replace(**every, logit_bias={4: -100})
    with pytest.raises(RequestError, match=r"prompt 0: min_tokens is 2, .* ban all 5 tokens"):
        llm.generate([[1, 2]], params)
