"""Reject keys of config.json that Kiln does not read: they may change what the model computes."""

from __future__ import annotations

from collections.abc import Collection

from kiln.engine.models.fields import Fields

# Keys that ``hf_config`` and ``rope_config`` read for every family.
_READ = (
    *("architectures", "dtype", "torch_dtype", "quantization_config", "layer_types"),
    *("is_causal", "use_bidirectional_attention"),
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("max_position_embeddings", "max_sequence_length", "max_seq_length", "max_seq_len"),
    "original_max_position_embeddings",
)
# Keys that describe the file or the training, or select between equivalent implementations.
_METADATA = (
    *("model_type", "transformers_version", "name_or_path"),
    *("auto_map", "custom_pipelines", "transformers.js_config", "is_llama_config"),
    *("unsloth_fixed", "unsloth_version", "finetuning_task", "task_specific_params"),
    *("id2label", "label2id", "num_labels", "problem_type", "tokenizer_class"),
    *("initializer_range", "pretraining_tp", "chunk_size_feed_forward", "gradient_checkpointing"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("tie_last_hidden_states", "attn_implementation", "experts_implementation"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
# Generation settings, which transformers also drops from config.json.
_GENERATION = (
    *("max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("early_stopping", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
)
_KNOWN = frozenset((*_READ, *_METADATA, *_GENERATION))
_HARMLESS_ENDINGS = ("dropout", "_pdrop", "_token_id")  # dropout affects only training


def refuse_unknown_keys(fields: Fields, own: Collection[str], architecture: str) -> None:
    """Check the keys of config.json; ``own`` are the extra keys that this family reads.

    A key that is null, false, zero or empty is accepted. Raises ModelError naming the key.
    """
    for name in fields.switched_on():
        if name not in _KNOWN and name not in own and not name.endswith(_HARMLESS_ENDINGS):
            raise fields.error(
                name,
                f"Kiln does not support this key for {architecture}: "
                "remove it if it does not change what the model computes",
            )
