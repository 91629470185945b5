"""What each field of an answer means; ``/docs`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kiln.engine.server.part_fields import Fields

# Fields that mean the same in every answer. Those that an answer has words for are not looked up.
ANYWHERE: Fields = MappingProxyType(
    {
        "object": "Tells what kind of object this is",
        "type": "Tells what kind of object this is",
        "id": "The id of the answer",
        "created": "When the answer began, in Unix time",
        "model": "The name that the request asked for",
        "index": "Which of the outputs this is, from 0 on",
        "usage": "Token counts of the request",
        "data": "The entries of the list",
        "token_ids": "Token ids of the output, with return_token_ids",
        "prompt_token_ids": "Token ids of the prompt, with return_token_ids",
        "prompt_logprobs": "For each token of the prompt, with prompt_logprobs: log-probabilities "
        "by token id; null for the first token",
        "logprobs": "Log-probabilities, if they were asked for",
        "finish_reason": "Why the output ended: stop, length, or tool_calls in a chat",
        "stop_reason": "The stop string or the id of the stop token that ended the output",
        "seed": "With it and the same settings the output can be made again",
        "implementation": "jit, triton, torch or host; of all-reduce, the algorithm",
        "reason": "Why it was chosen",
        "lora_name": "The name of the adapter",
        "max_model_len": "The context: prompt and output together, in tokens",
    }
)
_TOKEN: Fields = {
    "token": "The token as text",
    "logprob": "Its log-probability",
    "bytes": "Its bytes, because a token may be part of a character; null: it stands for no text",
}
_OPENAI: Mapping[str, Fields] = {
    "ChatCompletion": {"choices": "The outputs, as many as n"},
    "ChatChoice": {"message": "The output"},
    "AssistantMessage": {
        "role": "Always assistant",
        "content": "The text; null if there are only tool calls",
        "refusal": "Always null",
        "reasoning_content": "The reasoning before the text, if the model writes any",
        "reasoning": "The same under its other name",
        "tool_calls": "The calls that the client is asked to make",
    },
    "ToolCall": {
        "id": "By which the tool's message refers to the call",
        "function": "The function, and the arguments of the call",
    },
    "FunctionCall": {
        "name": "The name of the function",
        "arguments": "JSON as text, as the model wrote it",
    },
    "ChatLogprobs": {"content": "One entry for each token of the output"},
    "ChatLogprob": {**_TOKEN, "top_logprobs": "The most likely tokens at this place"},
    "TopLogprob": _TOKEN,
    "Completion": {"choices": "The outputs, by prompt, n of each"},
    "CompletionChoice": {"text": "The output"},
    "CompletionLogprobs": {
        "text_offset": "Where each token begins in the text, in characters",
        "token_logprobs": "The log-probability of each token; null: it is the first of the prompt",
        "tokens": "The tokens as text",
        "top_logprobs": "The most likely tokens at each place, with their log-probabilities",
    },
    "Usage": {
        "prompt_tokens": "Tokens of the prompts",
        "completion_tokens": "Tokens of the outputs",
        "total_tokens": "Both together",
        "prompt_tokens_details": "How many of the prompts' tokens the prefix cache had",
    },
    "PromptTokensDetails": {"cached_tokens": "Prompt tokens that needed no computation"},
    "ResponseObject": {
        "created_at": "When the answer began, in Unix time",
        "status": "completed; incomplete: the output was cut off; in_progress, in the first events",
        "output": "Items: messages, function calls, reasoning",
        "incomplete_details": "Why the answer is incomplete; null: it is not",
        "store": "Always false: responses are not kept",
    },
    "EmbeddingItem": {
        "index": "Which of the inputs this is, from 0 on",
        "embedding": "The numbers; with encoding_format base64 their bytes as text",
    },
    "EmbeddingList": {"usage": "Token counts of all inputs"},
    "EmbeddingUsage": {"prompt_tokens": "Tokens of all inputs", "total_tokens": "The same"},
    "ModelCard": {
        "id": "The name of the model or of a LoRA adapter",
        "created": "When the server was started, in Unix time",
        "owned_by": "Always kiln",
        "root": "The first name of the model",
        "parent": "That name for a LoRA adapter; null for the model itself",
        "max_model_len": "The context in tokens; null while the model loads",
        "task": "generate, or embed; null while the model loads",
        "default_sampling_params": "Settings of the model's own, where a request leaves one out",
        "permission": "Always empty; older clients of OpenAI read it",
    },
    "ErrorBody": {
        "message": "What is wrong, where, and what to do",
        "type": "The kind of the error",
        "param": "The field at fault; null: there is none",
        "code": "The kind of the error for programs; null: it has none",
    },
    "ErrorEnvelope": {"error": "What went wrong"},
}
_OTHERS: Mapping[str, Fields] = {
    "AnthropicMessage": {
        "role": "Always assistant",
        "content": "Blocks: thinking, text, tool_use",
        "stop_reason": "end_turn, max_tokens, stop_sequence or tool_use",
        "stop_sequence": "Which of stop_sequences ended the output; null: none did",
    },
    "AnthropicError": {"error": "What went wrong"},
    "AnthropicErrorBody": {
        "type": "The kind of the error",
        "message": "What is wrong, where, and what to do",
        "details": "More for programs",
    },
    "TokenCount": {"input_tokens": "Tokens of the prompt"},
    "Tokens": {
        "count": "How many tokens there are",
        "tokens": "The token ids",
        "token_strs": "The tokens as they stand in the vocabulary, with return_token_strs",
    },
    "DetokenizedText": {"prompt": "The text of the tokens, special tokens included"},
    "AdapterCard": {
        "lora_path": "The folder that it was loaded from",
        "pinned": "Whether it is never evicted from the device",
        "max_rank": "The largest rank of its layers",
        "num_bytes": "Its size on the device",
        "on_device": "Whether it is in the adapter pool",
        "running": "Its requests that run",
        "waiting": "Its requests that wait",
    },
    "Unloaded": {"status": "Always unloaded"},
    "Status": {"status": "live, or ready"},
    "KernelStatus": {
        "device": "Where the model runs",
        "dtype": "The type of its activations",
        "kernels": "What was chosen for each kernel family, by its name",
        "graphs": "The CUDA graphs",
        "all_reduce": "What sums over the ranks; null: the model has one rank",
    },
    "GraphStatus": {
        "captured": "How many graphs there are",
        "num_bytes": "The device memory that they take",
        "capture_seconds": "The time that their capture took",
        "replays": "Steps that ran in a graph, by its size",
        "fallbacks": "Steps without a graph, by reason",
    },
    "AllReduceStatus": {"sums": "How many tensors were summed, by algorithm"},
    "Stats": {
        "time": "When the answer was made, in Unix time",
        "version": "Kiln's version",
        "state": "ready, or the code of the error that a request would get now, such as loading",
        "message": "The text of that error",
        "model": "What is served; null until it is loaded",
        "values": "Counters and gauges of GET /metrics by their names without kiln:; those with a "
        "label are maps by its value",
        "histograms": "Histograms of GET /metrics by their names without kiln:",
    },
    "ServedModelInfo": {
        "names": "The names of the model for requests",
        "device": "Where it runs",
        "dtype": "The type of its activations",
        "budget": "How many tokens a step computes at most, and why",
    },
    "HistogramValues": {
        "bounds": "The upper bounds of all buckets but the last, which has none",
        "counts": "How many observations were at most each bound; the last: all",
        "sum": "The sum of all observations",
    },
    "Timeline": {
        "first": "The position of the first record; above since if older ones are gone",
        "next": "Since which position to ask for those that follow",
        "steps": "The records, oldest first",
    },
    "StepEntry": {
        "engine": "Which engine process ran it, from 1 on; each restart begins another",
        "number": "Which of its steps this is, from 1 on",
        "begun": "When its launch began, in Unix time",
        "seconds": "From then until its tokens were in host memory",
        "waited": "The last part of these seconds, in which the host only waited for the device",
        "kind": "decode: the last token of each request, and drafts; prefill: parts of prompts; "
        "mixed: both",
        "requests": "How many requests took part",
        "tokens": "Tokens that were computed, drafts included",
        "drafts": "Drafts that were verified",
        "generated": "Tokens that requests got",
        "graph": "The size of the CUDA graph that ran it; null: none did",
        "why_eager": "The reason why no graph ran it; null: one did",
    },
}
ANSWERS: Mapping[str, Fields] = MappingProxyType({**_OPENAI, **_OTHERS})
