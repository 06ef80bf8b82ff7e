"""What the flags of training scripts mean for memory: transformers' Trainer, TRL, axolotl, torchtitan, launchers.

One table per question, keyed by the flag without dashes, with underscores; dotted ones of torchtitan in full.
"""

from __future__ import annotations

MODEL = ("model_name_or_path", "base_model", "model_name", "pretrained_model_name_or_path", "config_name", "model_id")
BATCH = (
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "micro_batch_size",
    "train_batch_size",
    "batch_size",
    "micro_batch_size_per_gpu",
    "training.local_batch_size",
    "training.batch_size",
)
LENGTH = (
    "max_seq_length",
    "max_seq_len",
    "max_length",
    "model_max_length",
    "seq_len",
    "seq_length",
    "sequence_len",
    "sequence_length",
    "block_size",
    "cutoff_len",
    "training.seq_len",
)
ACCUMULATE = ("gradient_accumulation_steps", "grad_accum_steps", "gradient_accumulation")
NORM = ("max_grad_norm", "gradient_clipping", "training.max_norm", "clip_grad_norm")
WEIGHT_DTYPE = ("torch_dtype", "dtype", "model_dtype")
OPTIMIZER = ("optim", "optimizer", "optim_type", "optimizer.name")
ATTENTION = ("attn_implementation", "attention_implementation")
RECOMPUTE = (
    "gradient_checkpointing",
    "use_gradient_checkpointing",
    "activation_checkpointing",
    "grad_checkpointing",
    "activation_checkpoint.mode",
)
LORA_ON = ("use_peft", "use_lora", "lora", "adapter", "peft_type")
LORA_RANK = ("lora_r", "lora_rank", "lora_rank_r", "peft_r")
LORA_TARGETS = ("lora_target_modules", "lora_target", "lora_targets")
LORA_EVERYWHERE = ("lora_target_linear",)
DORA = ("use_dora", "lora_dora", "peft_use_dora")
LORA_WHOLE = ("lora_modules_to_save", "modules_to_save")
LOADED_IN = {"load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit", "quantization_bit": ""}
# how 4-bit weights are quantised in detail: NF4 and twice is what is counted
QUANTISED_HOW = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "double_quantization", "bnb_4bit_compute_dtype")
PACKED = ("packing", "sample_packing", "padding_free")
LIGER = ("use_liger_kernel", "use_liger", "enable_liger_kernel")
WORLD = ("nproc_per_node", "num_processes", "num_gpus", "gpus", "devices", "world_size")
NODES = ("nnodes", "num_machines", "num_nodes")

_ADAMW = ("adamw", "adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_ADAMW8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit", "adamw_torch_8bit")
OPTIMIZERS = {
    **dict.fromkeys((*_ADAMW, "paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(_ADAMW8BIT, "adamw8bit"),
    "adafactor": "adafactor",
    "sgd": "sgd",
}
DTYPES = {
    **dict.fromkeys(("float32", "fp32", "float"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float16", "fp16", "half"), "fp16"),
}
# what a flag says about memory that is not modelled: the figure is then too high, or too low
NOT_MODELLED = {
    **dict.fromkeys(LIGER, "without the package liger-kernel here its kernels are not counted: logits are whole"),
    "torch_compile": "compiled kernels are not modelled: the step is counted as eager",
    "compile": "compiled kernels are not modelled: the step is counted as eager",
    "training.compile": "compiled kernels are not modelled: the step is counted as eager",
    "neftune_noise_alpha": "NEFTune's noise is not modelled",
    "ref_model": "a reference model is not modelled: its weights come on top",
    "tensor_parallel_size": "tensor parallelism is not modelled",
    "parallelism.tensor_parallel_degree": "tensor parallelism is not modelled",
    "parallelism.pipeline_parallel_degree": "pipeline parallelism is not modelled",
    "parallelism.context_parallel_degree": "context parallelism is not modelled",
    "cpu_offload": "states on the host are not modelled: they are counted on the device",
    "optim_target_modules": "an optimizer of some modules only is not modelled",
}
# flags that leave a training step's memory as it is: their first words
HARMLESS = (  # noqa: SIM905
    "learning_rate lr num_train_epochs num_epochs epochs max_steps output_dir overwrite_output_dir dataset data_ "
    "train_file validation_file test_file eval_ per_device_eval_batch_size do_train do_eval do_predict evaluation_ "
    "logging_ log_ save_ warmup lr_scheduler weight_decay adam_ seed report_to run_name wandb hub_ push_to_hub resume "
    "preprocessing_ dataloader_ num_workers cache_dir token use_auth_token trust_remote_code use_fast remove_unused "
    "group_by_length ddp_timeout ddp_find_unused ignore_data_skip disable_tqdm tokenizer template chat_template "
    "completion_only_loss assistant_only_loss overwrite_cache val_set_size steps metrics. checkpoint. profiling. job. "
    "lr_scheduler. optimizer.lr training.steps training.dataset model.tokenizer comm. lora_alpha lora_dropout "
    "lora_target lora_modules finetuning_type stage plot_loss model_revision include_ greater_is_better load_best "
    "master_port master_addr rdzv_ node_rank machine_rank main_process tee redirects standalone local_rank "
    "max_restarts start_method mixed_precision config_file hostfile include exclude num_cpu no_python module tf32 "
    "full_determinism average_tokens label_smoothing neptune special_tokens"
).split()
EXACTLY = {"stage", "steps", "lr", "seed", "module", "include", "token", "tf32"}  # of those, not as a beginning
SWITCHES = {
    "bf16",
    "fp16",
    *RECOMPUTE[:4],
    *LORA_ON[:3],
    *PACKED,
    *DORA,
    "load_in_4bit",
    "load_in_8bit",
    "torch_compile",
}


def is_harmless(name: str) -> bool:
    """Whether a flag is known to leave memory as it is."""
    return any(name == known or (known not in EXACTLY and name.startswith(known)) for known in HARMLESS)
