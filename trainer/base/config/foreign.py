"""Settings of other trainers, under the names and values that their users know, and what replaces each of them here.

An unknown setting with one of these names is an error whose line names the replacement. docs/coming_from.md is generated from
the same table. A note names settings as `section.name`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PROJECTS = {
    "torchtitan": "T",
    "torchtune": "t",
    "TRL and transformers": "H",
    "axolotl": "a",
    "nanochat": "n",
    "Megatron-LM": "M",
}
"""Project -> its letter in the table."""


@dataclass(frozen=True)
class Foreign:
    """What replaces a setting of other projects."""

    projects: str
    """Letters of the projects that use the name."""
    settings: str
    """The settings to use instead, separated by spaces. Empty: there is none, and the note says why."""
    note: str = ""
    """How the value is converted, or why there is no such setting."""


_RESUME = "needed only to go back: runs resume by themselves"
_RUN = "one folder holds everything of a run: run.output_folder / run.name"
_BATCH = "gradients are accumulated over global_batch_size / (local_batch_size x data-parallel ranks) microbatches"
_DTYPE = "bf16 or fp32"
_WARMUP = "a number of steps: the ratio times training.steps"
_SIZES = "model.name and model.size choose a published model; an override changes one dimension of it"
_AUTO = "not needed: "
_NONE = "not supported: "
_ON = "true is full, or selective to recompute less"
_FLOAT8 = "tensorwise or rowwise, with training.float8_exclude; the output stays in training.compute_dtype"
_FP16 = "bf16 or fp32; bf16 has the range of fp32, so that no loss is scaled; fp16 is not supported"
_TOKENIZER = "a tokenizer's file, or the folder with its tokenizer.json"
_SHARD = "parameters, gradients and moments are sharded over all ranks by default (FSDP)"
_DATASET = "with data.dataset, such as chat, jsonl, parquet or huggingface (by name)"
_MODEL = "or --from FOLDER, which gives model, initial weights, tokenizer and chat template"
_NF4 = "nf4, with lora.rank; the base is quantized while it is loaded"
_LONG = "the sample length; data.long_documents = truncate cuts longer documents"
_SEND = "a list such as console,jsonl,wandb"
_FLASH = "attention runs in the fastest kernel of torch (scaled_dot_product_attention)"
_LAUNCH = "run_llama_train.sh starts the ranks: NGPU=8 ./run_llama_train.sh"

FOREIGN: Mapping[str, Foreign] = {
    # ---------------------------------------------------------------- length of the run and batches
    "max_steps": Foreign("Ha", "training.steps"),
    "num_iterations": Foreign("n", "training.steps"),
    "train_iters": Foreign("M", "training.steps"),
    "max_iters": Foreign("", "training.steps"),
    "total_steps": Foreign("", "training.steps"),
    "train_samples": Foreign("M", "training.steps", "samples / training.global_batch_size"),
    "max_steps_per_epoch": Foreign("t", "training.steps", "the steps of the whole run"),
    "num_train_epochs": Foreign("H", "training.epochs"),
    "num_epochs": Foreign("a", "training.epochs"),
    "epochs": Foreign("t", "training.epochs"),
    "per_device_train_batch_size": Foreign("H", "training.local_batch_size"),
    "device_batch_size": Foreign("n", "training.local_batch_size"),
    "micro_batch_size": Foreign("aM", "training.local_batch_size"),
    "train_micro_batch_size_per_gpu": Foreign("", "training.local_batch_size"),
    "batch_size": Foreign("t", "training.local_batch_size training.global_batch_size", "per rank, and per step"),
    "train_batch_size": Foreign("", "training.global_batch_size"),
    "total_batch_size": Foreign("n", "training.global_batch_size", "in samples: tokens / training.seq_len"),
    "rampup_batch_size": Foreign("M", "training.batch_schedule", "each size with the number of steps before it"),
    "batch_size_schedule": Foreign("", "training.batch_schedule"),
    "batch_size_scheduler": Foreign("", "training.batch_schedule"),
    "batch_size_warmup": Foreign("", "training.batch_schedule"),
    "gradient_accumulation_steps": Foreign("Hta", "training.global_batch_size training.local_batch_size", _BATCH),
    "grad_accum_steps": Foreign("", "training.global_batch_size training.local_batch_size", _BATCH),
    "seq_length": Foreign("M", "training.seq_len"),
    "max_seq_len": Foreign("tn", "training.seq_len"),
    "max_seq_length": Foreign("H", "training.seq_len", _LONG),
    "max_length": Foreign("H", "training.seq_len", _LONG),
    "sequence_len": Foreign("a", "training.seq_len", _LONG),
    "block_size": Foreign("", "training.seq_len"),
    "cutoff_len": Foreign("", "training.seq_len", _LONG),
    "random_seed": Foreign("", "run.seed"),
    "data_seed": Foreign("H", "run.seed", "one seed for the initial weights and the order of samples"),
    "full_determinism": Foreign("H", "run.deterministic", "on"),
    # ---------------------------------------------------------------- precision
    "bf16": Foreign("HaM", "training.compute_dtype", "bf16, which is the default"),
    "fp16": Foreign("HaM", "training.compute_dtype", _FP16),
    "tf32": Foreign("Ha", "training.compute_dtype", _DTYPE),
    "dtype": Foreign("tH", "training.compute_dtype", _DTYPE),
    "torch_dtype": Foreign("H", "training.compute_dtype", _DTYPE),
    "precision": Foreign("", "training.compute_dtype", _DTYPE),
    "mixed_precision": Foreign("", "training.compute_dtype", _DTYPE),
    "mixed_precision_param": Foreign("T", "training.compute_dtype", _DTYPE),
    "mixed_precision_reduce": Foreign("T", "parallel.reduce_dtype"),
    "fp8": Foreign("naM", "training.float8", _FLOAT8),
    "fp8_format": Foreign("M", "training.float8", _FLOAT8),
    "fp8_recipe": Foreign("nM", "training.float8", _FLOAT8),
    "enable_fp8_training": Foreign("t", "training.float8", _FLOAT8),
    "fp8_recipe_name": Foreign("t", "training.float8", _FLOAT8),
    "recipe_name": Foreign("T", "training.float8", _FLOAT8),
    "converters": Foreign("T", "training.float8", _FLOAT8),
    "filter_fqns": Foreign("T", "training.float8_exclude", "patterns of complete names, such as *.wk"),
    "enable_fsdp_float8_all_gather": Foreign("T", "", _NONE + "parameters are gathered in training.compute_dtype"),
    "fp8_enable_fsdp_float8_all_gather": Foreign("a", "", _NONE + "parameters are gathered in training.compute_dtype"),
    "precompute_float8_dynamic_scale_for_fsdp": Foreign("T", "", _AUTO + "scales need no communication"),
    "fp8_amax_history_len": Foreign("M", "", _AUTO + "a scale is that of the present values"),
    "load_in_4bit": Foreign("Ha", "lora.base_dtype", _NF4),
    "bnb_4bit_quant_type": Foreign("Ha", "lora.base_dtype", _NF4),
    "bnb_4bit_use_double_quant": Foreign("Ha", "lora.base_dtype", "nf4_double"),
    "bnb_4bit_compute_dtype": Foreign("Ha", "training.compute_dtype", _DTYPE),
    "bnb_4bit_quant_storage": Foreign("Ha", "", _AUTO + "codes and scales are always bytes, which FSDP does not cast"),
    "quantize_base": Foreign("t", "lora.base_dtype", _NF4),
    "load_in_8bit": Foreign("Ha", "", _NONE + "a base model in 8 bits; lora.base_dtype = nf4 needs less memory"),
    # ---------------------------------------------------------------- optimizer and learning rate
    "learning_rate": Foreign("Ha", "optimizer.lr"),
    "max_lr": Foreign("", "optimizer.lr"),
    "matrix_lr": Foreign("n", "optimizer.muon_lr", "with optimizer.name = muon"),
    "muon_momentum": Foreign("M", "optimizer.muon_momentum"),
    "embedding_lr": Foreign("na", "optimizer.groups", '{ "tok_embeddings.*" = "lr=0.3" }, a factor of optimizer.lr'),
    "unembedding_lr": Foreign("n", "optimizer.groups", '{ "output.*" = "lr=0.3" }, a factor of optimizer.lr'),
    "lr_groups": Foreign("a", "optimizer.groups", "patterns of names, and factors of optimizer.lr"),
    "loraplus_lr_ratio": Foreign("a", "optimizer.groups", '{ "*lora_b" = "lr=16" }, a factor of optimizer.lr'),
    "loraplus_lr_embedding": Foreign("a", "optimizer.groups", '{ "tok_embeddings.*" = "lr=0.3" }'),
    "min_lr": Foreign("M", "lr_schedule.min_lr_ratio", "a fraction of optimizer.lr"),
    "min_lr_factor": Foreign("T", "lr_schedule.min_lr_ratio"),
    "final_lr_frac": Foreign("n", "lr_schedule.min_lr_ratio"),
    "cosine_min_lr_ratio": Foreign("a", "lr_schedule.min_lr_ratio"),
    "lr_scheduler_type": Foreign("H", "lr_schedule.name"),
    "lr_scheduler": Foreign("a", "lr_schedule.name"),
    "lr_decay_style": Foreign("M", "lr_schedule.name"),
    "decay_type": Foreign("T", "lr_schedule.name"),
    "decay_ratio": Foreign("T", "lr_schedule.decay_steps", "a number of steps"),
    "warmdown_ratio": Foreign("n", "lr_schedule.decay_steps", "a number of steps"),
    "lr_decay_iters": Foreign("M", "training.steps", "the rate decays until the last step"),
    "lr_wsd_decay_iters": Foreign("M", "lr_schedule.decay_steps"),
    "warmup_ratio": Foreign("Han", "lr_schedule.warmup_steps", _WARMUP),
    "warmup": Foreign("", "lr_schedule.warmup_steps"),
    "warmup_iters": Foreign("", "lr_schedule.warmup_steps"),
    "num_warmup_steps": Foreign("t", "lr_schedule.warmup_steps"),
    "lr_warmup_iters": Foreign("M", "lr_schedule.warmup_steps"),
    "lr_warmup_fraction": Foreign("M", "lr_schedule.warmup_steps", _WARMUP),
    "max_grad_norm": Foreign("Ha", "training.max_norm"),
    "grad_clip": Foreign("n", "training.max_norm"),
    "clip_grad": Foreign("M", "training.max_norm"),
    "clip_grad_norm": Foreign("t", "training.max_norm"),
    "gradient_clipping": Foreign("", "training.max_norm"),
    "optim": Foreign(
        "H", "optimizer.name", "adamw or muon; optimizer.state_dtype = 8bit keeps the moments of adamw in 8 bits"
    ),
    "beta1": Foreign("T", "optimizer.betas", "both decay rates, such as 0.9,0.95"),
    "beta2": Foreign("T", "optimizer.betas", "both decay rates, such as 0.9,0.95"),
    "adam_beta1": Foreign("HaM", "optimizer.betas", "both decay rates, such as 0.9,0.95"),
    "adam_beta2": Foreign("HaM", "optimizer.betas", "both decay rates, such as 0.9,0.95"),
    "adam_epsilon": Foreign("Ha", "optimizer.eps"),
    "adam_eps": Foreign("M", "optimizer.eps"),
    "wd": Foreign("", "optimizer.weight_decay"),
    "z_loss_multiplier": Foreign("", "training.z_loss"),
    "cautious_wd": Foreign("", "optimizer.cautious_decay"),
    "cautious_weight_decay": Foreign("", "optimizer.cautious_decay"),
    "early_step_in_backward": Foreign("T", "optimizer.in_backward"),
    "optimizer_in_bwd": Foreign("t", "optimizer.in_backward"),
    "use_distributed_optimizer": Foreign("M", "", _AUTO + _SHARD),
    # ---------------------------------------------------------------- LoRA and preferences
    "lora_r": Foreign("Ha", "lora.rank"),
    "lora_rank": Foreign("t", "lora.rank"),
    "lora.r": Foreign("", "lora.rank"),
    "lora_alpha": Foreign("Hta", "lora.alpha"),
    "lora_dropout": Foreign("Hta", "lora.dropout"),
    "lora_target_modules": Foreign("Ha", "lora.targets", "names of this model's modules, such as *.attention.w[qv]"),
    "target_modules": Foreign("H", "lora.targets", "names of this model's modules, such as *.attention.w[qv]"),
    "lora_attn_modules": Foreign("t", "lora.targets", "names of this model's modules, such as *.attention.w[qv]"),
    "lora_target_linear": Foreign("a", "lora.targets", '"*", which is the default'),
    "apply_lora_to_mlp": Foreign("t", "lora.targets", '"*", which is the default'),
    "lora_modules_to_save": Foreign("Ha", "lora.train_fully"),
    "modules_to_save": Foreign("H", "lora.train_fully"),
    "use_rslora": Foreign("H", "lora.rslora"),
    "peft_use_rslora": Foreign("a", "lora.rslora"),
    "lora_model_dir": Foreign("a", "lora.init_from"),
    "use_peft": Foreign("H", "lora.rank", "any rank trains an adapter"),
    "use_lora": Foreign("", "lora.rank", "any rank trains an adapter"),
    "adapter": Foreign("a", "lora.rank", "any rank trains an adapter"),
    "loss_type": Foreign("H", "preference.loss"),
    "rl": Foreign("a", "preference.loss"),
    "rl_beta": Foreign("a", "preference.beta"),
    "dpo_beta": Foreign("", "preference.beta"),
    "ref_model": Foreign("H", "checkpoint.init_from", "the initial weights are the reference model"),
    "precompute_ref_log_probs": Foreign("H", "", _AUTO + "the reference's log-probabilities are always computed first"),
    # ---------------------------------------------------------------- parallelism and memory
    "tensor_parallel_degree": Foreign("T", "parallel.tp"),
    "tensor_parallel_size": Foreign("a", "parallel.tp"),
    "tensor_parallel_dim": Foreign("t", "parallel.tp"),
    "tensor_model_parallel_size": Foreign("M", "parallel.tp"),
    "pipeline_parallel_degree": Foreign("T", "parallel.pp"),
    "pipeline_model_parallel_size": Foreign("M", "parallel.pp"),
    "context_parallel_degree": Foreign("T", "parallel.cp"),
    "context_parallel_size": Foreign("aM", "parallel.cp"),
    "context_parallel_dim": Foreign("t", "parallel.cp"),
    "sequence_parallel_degree": Foreign("a", "parallel.cp", "each sequence is split over ranks"),
    "data_parallel_shard_degree": Foreign("T", "parallel.dp_shard"),
    "data_parallel_shard_dim": Foreign("t", "parallel.dp_shard"),
    "dp_shard_size": Foreign("a", "parallel.dp_shard"),
    "dp_size": Foreign("", "parallel.dp_shard"),
    "data_parallel_replicate_degree": Foreign("T", "parallel.dp_replicate"),
    "data_parallel_replicate_dim": Foreign("t", "parallel.dp_replicate"),
    "dp_replicate_size": Foreign("a", "parallel.dp_replicate"),
    "data_parallel_size": Foreign("M", "parallel.dp_shard", "-1, the default: all ranks that the others do not use"),
    "expert_parallel_degree": Foreign("T", "parallel.ep"),
    "expert_model_parallel_size": Foreign("M", "parallel.ep"),
    "pipeline_parallel_schedule": Foreign("T", "parallel.pipeline_schedule"),
    "num_layers_per_virtual_pipeline_stage": Foreign("M", "parallel.pipeline_stages_per_rank", "a number of stages"),
    "pipeline_parallel_layers_per_stage": Foreign("T", "parallel.pipeline_stages_per_rank", "a number of stages"),
    "pipeline_parallel_microbatch_size": Foreign("T", "training.local_batch_size"),
    "fsdp_reshard_after_forward": Foreign("Tt", "parallel.reshard_after_forward"),
    "enable_async_tensor_parallel": Foreign("T", "parallel.async_tensor_parallel"),
    "enable_cpu_offload": Foreign("T", "parallel.cpu_offload"),
    "fsdp_cpu_offload": Foreign("t", "parallel.cpu_offload"),
    "disable_loss_parallel": Foreign("T", "", _AUTO + "with parallel.tp > 1 the loss is always vocabulary-parallel"),
    "fsdp": Foreign("H", "parallel.dp_shard", "-1, the default: " + _SHARD),
    "fsdp_config": Foreign("Ha", "parallel.dp_shard", "-1, the default: " + _SHARD),
    "deepspeed": Foreign("Ha", "parallel.dp_shard", "-1, the default: " + _SHARD),
    "zero_stage": Foreign("", "parallel.dp_shard", "-1, the default: " + _SHARD),
    "num_gpus": Foreign("", "", _LAUNCH),
    "nproc_per_node": Foreign("", "", _LAUNCH),
    "ngpu": Foreign("", "", _LAUNCH),
    "world_size": Foreign("", "", _LAUNCH),
    "nnodes": Foreign("", "", "docs/multi_node.md shows how to start several nodes"),
    "train_config": Foreign("", "", "the option is --config FILE"),
    "local_rank": Foreign("H", "", _LAUNCH),
    "device_type": Foreign("n", "run.device"),
    "use_cpu": Foreign("H", "run.device", "cpu"),
    "gradient_checkpointing": Foreign("Ha", "activation_checkpoint.mode", _ON),
    "enable_activation_checkpointing": Foreign("t", "activation_checkpoint.mode", _ON),
    "recompute_activations": Foreign("M", "activation_checkpoint.mode", "selective"),
    "recompute_granularity": Foreign("M", "activation_checkpoint.mode", "full or selective"),
    "selective_ac_option": Foreign("T", "activation_checkpoint.save activation_checkpoint.every_n_blocks"),
    "enable_activation_offloading": Foreign("t", "activation_checkpoint.offload_inputs"),
    "activation_offloading": Foreign("Ha", "activation_checkpoint.offload_inputs"),
    "torch_compile": Foreign("Ha", "compile.enabled"),
    "attn_implementation": Foreign("H", "", _AUTO + _FLASH),
    "flash_attention": Foreign("a", "", _AUTO + _FLASH),
    "use_flash_attn": Foreign("M", "", _AUTO + _FLASH),
    "use_liger_kernel": Foreign("H", "", _AUTO + "the loss is computed in chunks (training.loss_chunk_tokens)"),
    "ddp_timeout": Foreign("H", "distributed.timeout_s"),
    "init_timeout_seconds": Foreign("T", "distributed.init_timeout_s"),
    "train_timeout_seconds": Foreign("T", "distributed.timeout_s"),
    "distributed_timeout_minutes": Foreign("M", "distributed.timeout_s", "in seconds"),
    # ---------------------------------------------------------------- model, tokenizer and weights
    "model_name_or_path": Foreign("H", "model.pretrained", _MODEL),
    "pretrained_model_name_or_path": Foreign("H", "model.pretrained", _MODEL),
    "base_model": Foreign("a", "model.pretrained", _MODEL),
    "checkpoint_dir": Foreign("t", "model.pretrained", _MODEL),
    "initial_load_path": Foreign("T", "checkpoint.init_from"),
    "pretrained_checkpoint": Foreign("M", "checkpoint.init_from"),
    "finetune": Foreign("M", "checkpoint.init_from"),
    "flavor": Foreign("T", "model.size"),
    "depth": Foreign("n", "model.overrides", "such as model.overrides = { n_layers = 20 }"),
    "num_layers": Foreign("M", "model.overrides", f"n_layers; {_SIZES}"),
    "hidden_size": Foreign("M", "model.overrides", f"dim; {_SIZES}"),
    "num_attention_heads": Foreign("M", "model.overrides", f"n_heads; {_SIZES}"),
    "num_query_groups": Foreign("M", "model.overrides", f"n_kv_heads; {_SIZES}"),
    "ffn_hidden_size": Foreign("M", "model.overrides", f"hidden_dim; {_SIZES}"),
    "rotary_base": Foreign("M", "model.overrides", f"rope_theta; {_SIZES}"),
    "hf_assets_path": Foreign("T", "model.huggingface tokenizer.path", _TOKENIZER),
    "tokenizer_path": Foreign("T", "tokenizer.path", _TOKENIZER),
    "tokenizer_model": Foreign("M", "tokenizer.path", _TOKENIZER),
    "tokenizer_name_or_path": Foreign("H", "tokenizer.path", _TOKENIZER),
    "tokenizer_type": Foreign("aM", "tokenizer.backend"),
    "special_tokens": Foreign("a", "tokenizer.extra_special_tokens"),
    "resize_token_embeddings_to_32x": Foreign("a", "checkpoint.resize_embeddings", "to the size of the vocabulary"),
    "trust_remote_code": Foreign("H", "", _NONE + "code of a model folder is never run"),
    # ---------------------------------------------------------------- data
    "dataset_name": Foreign("H", "data.path", _DATASET),
    "dataset_path": Foreign("T", "data.path", _DATASET),
    "train_file": Foreign("", "data.path", _DATASET),
    "data_path": Foreign("M", "data.path", _DATASET),
    "data_dir": Foreign("", "data.path", _DATASET),
    "dataset_config": Foreign("H", "data.subset"),
    "dataset_train_split": Foreign("H", "data.split"),
    "dataset_text_field": Foreign("H", "data.text_field"),
    "dataset_prepared_path": Foreign("a", "data.store_folder"),
    "dataset_num_proc": Foreign("H", "data.prepare_workers"),
    "preprocessing_num_workers": Foreign("", "data.prepare_workers"),
    "dataloader_num_workers": Foreign("Ha", "data.prefetch", "the number of microbatches that one thread loads ahead"),
    "dataloader_prefetch_factor": Foreign("H", "data.prefetch", "the number of microbatches, for all workers together"),
    "val_set_size": Foreign("a", "data.held_out_fraction"),
    "sample_packing": Foreign("a", "data.packing", "best-fit, with data.document_mask = true"),
    "packed": Foreign("t", "data.packing", "best-fit, with data.document_mask = true"),
    "reset_attention_mask": Foreign("M", "data.document_mask"),
    "reset_position_ids": Foreign("M", "data.document_mask"),
    "excess_length_strategy": Foreign("a", "data.long_documents"),
    "train_on_inputs": Foreign("a", "data.dataset", "chat: only the assistant's messages are target tokens"),
    "train_on_input": Foreign("t", "data.dataset", "chat: only the assistant's messages are target tokens"),
    "assistant_only_loss": Foreign("H", "data.dataset", "chat: only the assistant's messages are target tokens"),
    "completion_only_loss": Foreign("H", "data.dataset", "chat: only the assistant's messages are target tokens"),
    "chat_template_path": Foreign("H", "data.chat_template"),
    "shuffle_merged_datasets": Foreign("a", "data.shuffle"),
    "streaming": Foreign("HT", "", _AUTO + "a prepared store is read from the disk, not kept in memory"),
    # ---------------------------------------------------------------- checkpoints and evaluation
    "output_dir": Foreign("Hta", "run.output_folder run.name", _RUN),
    "dump_folder": Foreign("T", "run.output_folder run.name", _RUN),
    "model_tag": Foreign("n", "run.name"),
    "save": Foreign("M", "run.output_folder run.name", _RUN),
    "load": Foreign("M", "checkpoint.init_from", "a run resumes by itself from its newest checkpoint"),
    "enable_checkpoint": Foreign("T", "checkpoint.enabled"),
    "checkpoint.interval": Foreign("T", "checkpoint.interval_steps"),
    "checkpoint.folder": Foreign("T", "run.output_folder run.name", _RUN),
    "keep_latest_k": Foreign("T", "checkpoint.keep"),
    "save_total_limit": Foreign("Ha", "checkpoint.keep"),
    "save_steps": Foreign("Ha", "checkpoint.interval_steps"),
    "save_interval": Foreign("M", "checkpoint.interval_steps"),
    "save_every": Foreign("n", "checkpoint.interval_steps"),
    "save_strategy": Foreign("Ha", "checkpoint.interval_steps", "a number of steps"),
    "async_save": Foreign("M", "checkpoint.async_mode", "thread"),
    "exclude_from_loading": Foreign("T", "checkpoint.init_exclude"),
    "last_save_in_hf": Foreign("T", "checkpoint.export_huggingface"),
    "resume_from_checkpoint": Foreign("Hta", "checkpoint.load_step", _RESUME),
    "resume_from_step": Foreign("n", "checkpoint.load_step", _RESUME),
    "resume": Foreign("", "checkpoint.load_step", _RESUME),
    "overwrite_output_dir": Foreign("H", "run.name", "a new name starts a new run"),
    "load_best_model_at_end": Foreign("H", "evaluation.keep_best_on"),
    "metric_for_best_model": Foreign("H", "evaluation.keep_best_on"),
    "early_stopping_patience": Foreign(
        "a", "evaluation.early_stopping_patience", "in evaluations of evaluation.keep_best_on"
    ),
    "eval_steps": Foreign("Ha", "evaluation.interval_steps"),
    "eval_interval": Foreign("M", "evaluation.interval_steps"),
    "eval_every": Foreign("n", "evaluation.interval_steps"),
    "eval_strategy": Foreign("H", "evaluation.interval_steps", "a number of steps"),
    "evaluation_strategy": Foreign("H", "evaluation.interval_steps", "a number of steps"),
    "run_val_every_n_steps": Foreign("t", "evaluation.interval_steps"),
    "eval_iters": Foreign("M", "evaluation.max_samples", "in samples"),
    "eval_tokens": Foreign("n", "evaluation.max_samples", "in samples"),
    "per_device_eval_batch_size": Foreign("H", "training.local_batch_size", "evaluation has the same size"),
    "sample_every": Foreign("n", "samples.interval_steps", "with samples.prompts"),
    "push_to_hub": Foreign("H", "checkpoint.export_huggingface", "writes the folder; nothing is uploaded"),
    # ---------------------------------------------------------------- metrics and profiling
    "report_to": Foreign("H", "metrics.sinks", _SEND),
    "metric_logger": Foreign("t", "metrics.sinks", _SEND),
    "enable_wandb": Foreign("T", "metrics.sinks", _SEND),
    "use_wandb": Foreign("", "metrics.sinks", _SEND),
    "wandb": Foreign("", "metrics.sinks", _SEND),
    "enable_tensorboard": Foreign("T", "metrics.sinks", "contains tensorboard by default"),
    "tensorboard_dir": Foreign("M", "metrics.sinks", "tensorboard/ in the run folder"),
    "logging_dir": Foreign("H", "metrics.sinks", "tensorboard/ in the run folder"),
    "log_freq": Foreign("T", "metrics.interval_steps"),
    "logging_steps": Foreign("Ha", "metrics.interval_steps"),
    "log_interval": Foreign("M", "metrics.interval_steps"),
    "log_every_n_steps": Foreign("t", "metrics.interval_steps"),
    "wandb_project": Foreign("aM", "metrics.project"),
    "wandb_entity": Foreign("a", "metrics.entity"),
    "wandb_name": Foreign("a", "metrics.run_name"),
    "experiment_name": Foreign("", "metrics.project"),
    "mlflow_experiment_name": Foreign("a", "metrics.project"),
    "enable_profiling": Foreign("T", "profiling.first_step"),
    "profile_freq": Foreign("T", "profiling.first_step", "the first step of one trace"),
    "enable_memory_snapshot": Foreign("T", "profiling.memory_snapshot"),
}
"""Name in other projects -> what replaces it. A name with a dot applies only in that section."""

SECTIONS = {
    "job": "run",
    "comm": "distributed",
    "lr_scheduler": "lr_schedule",
    "scheduler": "lr_schedule",
    "parallelism": "parallel",
    "validation": "evaluation",
    "eval": "evaluation",
    "dataset": "data",
    "dataloader": "data",
    "trainer": "training",
    "train": "training",
    "peft": "lora",
    "dpo": "preference",
    "wandb": "metrics",
    "logging": "metrics",
    "checkpointer": "checkpoint",
    "profiler": "profiling",
}
"""Section or table of other projects -> the section here."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "training.compute_dtype": {
        **dict.fromkeys(("bfloat16", "torch.bfloat16", "bf16-mixed"), "write bf16"),
        **dict.fromkeys(("float32", "torch.float32", "float", "32", "tf32"), "write fp32"),
        **dict.fromkeys(("float16", "fp16", "half", "torch.float16"), "bf16 has the range of fp32, unlike fp16"),
        **dict.fromkeys(("float8", "fp8"), "write bf16, with [training] float8 = tensorwise"),
        **dict.fromkeys(("int8", "mxfp8", "nvfp4"), "such products are not supported; see [training] float8"),
    },
    "training.float8": {
        **dict.fromkeys(("true", "on", "dynamic", "hybrid", "float8", "fp8"), "write tensorwise"),
        "axiswise": "write rowwise",
        **dict.fromkeys(("e4m3", "e5m2"), "a format, which follows from the scales: tensorwise or rowwise"),
        "rowwise_with_gw_hp": "rowwise computes the gradients of weights in float8 too",
        **dict.fromkeys(("delayed", "blockwise", "mxfp8", "nvfp4"), "such scales are not supported"),
        **dict.fromkeys(("false", "off"), "write none"),
    },
    "optimizer.name": {
        **dict.fromkeys(
            ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adam8bit", "adamw8bit"),
            "write adamw, with [optimizer] state_dtype = 8bit",
        ),
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "fusedadam", "torch.optim.adamw"), "write adamw"),
        **dict.fromkeys(("torch.optim.muon", "dist_muon", "normuon", "dion"), "write muon"),
        **dict.fromkeys(("lion", "sgd", "adafactor", "sophia"), "no other optimizer is supported"),
    },
    "lr_schedule.name": {
        "wsd": "write warmup_stable_decay",
        "warmup-stable-decay": "write warmup_stable_decay",
        "cosine_with_min_lr": "write cosine, with [lr_schedule] min_lr_ratio",
    },
    "lora.base_dtype": {
        **dict.fromkeys(("true", "4bit", "int4", "nf4tensor", "qlora"), "write nf4"),
        **dict.fromkeys(("false", "none", "bf16", "bfloat16", "fp32"), "write keep, with [training] parameter_dtype"),
        **dict.fromkeys(("fp4", "int8", "8bit", "mxfp4"), "nf4 is the only format of a quantized base"),
    },
    "data.packing": {
        "true": "write best-fit, with [data] document_mask = true",
        "bfd": "write best-fit",
        "ffd": "write best-fit",
        "false": "write none",
    },
    "data.dataset": {
        **dict.fromkeys(("json", "ndjson"), "write jsonl"),
        **dict.fromkeys(("txt", "plain"), "write text"),
        **dict.fromkeys(("sharegpt", "messages", "alpaca", "instruct", "sft", "conversation"), "write chat"),
        **dict.fromkeys(("dpo", "orpo", "pairs", "comparison"), "write preference, with [preference] loss"),
        **dict.fromkeys(("hf", "hub"), "write huggingface"),
        **dict.fromkeys(("bin", "memmap", "npy"), "write tokens"),
    },
    "activation_checkpoint.mode": {"true": "write full", "false": "write none", "op": "write selective"},
    "run.device": {"mps": "write cpu", **dict.fromkeys(("cuda", "cuda:0", "nvidia", "rocm", "gpu:0"), "write gpu")},
    "preference.loss": {"sigmoid": "write dpo", "kto": "not supported, because it needs no pairs"},
    "checkpoint.async_mode": {
        "async": "write thread",
        "process": "write thread",
        "disabled": "write off",
    },
}
"""Setting -> a value of other projects, in small letters -> what to write here."""


_PATH = "the first argument for the folder"
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "generate": {
        **dict.fromkeys(("model", "model_path", "model_name_or_path", "checkpoint", "ckpt", "checkpoint_dir"), _PATH),
        **dict.fromkeys(("max_tokens", "max_length", "num_tokens", "tokens"), "--max-new-tokens"),
        **dict.fromkeys(("text", "input"), "--prompt"),
        **dict.fromkeys(("interactive", "i"), "--chat"),
        **dict.fromkeys(("temp", "t"), "--temperature"),
        "system_prompt": "--system",
        "tp": "torchrun --nproc-per-node N scripts/generate.py",
    },
    "plan": {
        **dict.fromkeys(("gpus", "num_gpus", "ngpu", "nproc_per_node", "ranks"), "--world-size"),
        **dict.fromkeys(("gpu", "hardware", "gpu_type"), "--device"),
        **dict.fromkeys(("model", "model_name_or_path", "base_model"), "--config or --from"),
        "from_hf": "--from or --model.huggingface",
        **dict.fromkeys(("memory", "gpu_memory", "vram"), "--memory-gib"),
    },
    "prepare_data": {
        **dict.fromkeys(("input", "data", "file", "input_file", "dataset_path"), "--data.path"),
        **dict.fromkeys(("output", "out", "output_dir", "output_prefix"), "--data.store_folder"),
        **dict.fromkeys(("workers", "num_workers", "num_proc"), "--data.prepare_workers"),
        "format": "--data.dataset",
        "tokenizer": "--tokenizer.path",
    },
    "convert_hf": {
        **dict.fromkeys(("model", "input", "checkpoint", "path"), "SOURCE, the argument after the command"),
        **dict.fromkeys(("output", "out", "output_dir", "to"), "OUT, the last argument"),
        **dict.fromkeys(("torch_dtype", "precision", "export_dtype"), "--dtype"),
    },
    "checkpoint": dict.fromkeys(("path", "run", "dir", "folder"), "PATH, the argument after the command"),
}
"""Script -> an option of similar commands -> what to use."""


def normalized(name: str) -> str:
    """Return a name as in the table: small letters and underscores."""
    return name.strip("-+").lower().replace("-", "_")


def replacement(name: str, show: str) -> str:
    """Return a hint that names what replaces a setting of another project, or "" if the name is unknown.

    Args:
        name: With or without a section, in the spelling of a file or a flag.
        show: Format of one setting, with its section and its name: "[{0}] {1}".
    """
    key = normalized(name)
    found = FOREIGN.get(key) or FOREIGN.get(key.rpartition(".")[2])
    if found is None:
        return ""
    if not found.settings:
        return f"; {found.note}"
    names = " and ".join(show.format(*key.split(".")) for key in found.settings.split())
    return f"; use {names}" + f": {found.note}" * bool(found.note)
