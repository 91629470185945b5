"""Fields of quantization_config that say how a checkpoint was made, not what its tensors mean."""

from __future__ import annotations

from kiln.engine.models.fields import Fields

QUANTISER = (  # of AutoGPTQ, GPTQModel and transformers
    *("static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "meta"),
    *("act_group_aware", "mse", "model_name_or_path", "model_file_base_name", "dataset"),
    *("tokenizer", "model_seqlen", "block_name_to_quantize", "batch_size", "pad_token_id"),
    *("module_name_preceding_first_block", "cache_block_outputs"),
)
OTHER_ENGINES = (  # which kernels they should use
    *("backend", "use_exllama", "disable_exllama", "exllama_config", "max_input_length"),
    *("use_cuda_fp16", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
)
AUTOROUND = (
    *("autoround_version", "to_quant_block_names", "scale_dtype", "enable_quanted_input"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "seqlen", "batch_size", "train_bs"),
    *("gradient_accumulate_steps", "iters", "nsamples", "lr", "minmax_lr", "amp"),
    *("low_gpu_mem_usage", "low_cpu_mem_usage"),
)
NEUTRAL = (*QUANTISER, *OTHER_ENGINES, *AUTOROUND)


def has_signed_scales(fields: Fields) -> bool:
    """Whether scales may be below 0: AutoRound's may, in whichever format it writes them."""
    return "autoround_version" in fields or fields.text("quant_method", "") == "auto-round"
