"""Each row of the compatibility table, provoked. Each line of a user is one line here."""

# ruff: noqa: E501

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from tests.conftest import ROOT
from trainer.base.config import ConfigError
from trainer.base.config.compatibility import check, restrictions, rows
from trainer.base.config.fields import settings
from trainer.base.config.load import load_config
from trainer.base.config.schema import facts
from trainer.base.config.schema.condition import Fact, Known, When
from trainer.run.resolve import resolve


@dataclass(frozen=True)
class Case:
    """Settings that break one row."""

    argv: str
    line: str
    ranks: int = 0
    """Number of ranks for which the run is resolved. 0: the settings alone break the row."""
    facts: Mapping[Fact, Known] = field(default_factory=dict)
    """Facts of another device, of another torch, or of a command."""


CASES = {
    "[model] revision has an effect only with [model] pretrained": Case(
        "--model.revision v1", "--model.revision v1: has an effect only with [model] pretrained"
    ),
    "[tokenizer] pattern has an effect only with [tokenizer] backend = tiktoken": Case(
        "--tokenizer.pattern gpt2", "--tokenizer.pattern gpt2: has an effect only with [tokenizer] backend = tiktoken"
    ),
    "[tokenizer] reuse_reserved_tokens has an effect only with [tokenizer] backend = default, tiktoken or tekken": Case(
        "--tokenizer.backend huggingface --tokenizer.path x --tokenizer.reuse_reserved_tokens.a b",
        "--tokenizer.reuse_reserved_tokens.a b: has an effect only with [tokenizer] backend = default, tiktoken or tekken",
    ),
    "[tokenizer] path has an effect only with [tokenizer] backend != default": Case(
        "--tokenizer.backend default --tokenizer.path x",
        "--tokenizer.path x: has an effect only with [tokenizer] backend != default",
    ),
    "[data] dataset has an effect only with empty [data] datasets": Case(
        "--data.datasets.a chat: --data.dataset chat",
        "--data.dataset chat: has an effect only with empty [data] datasets",
    ),
    "[data] path has an effect only with empty [data] datasets": Case(
        "--data.datasets.a chat: --data.path x", "--data.path x: has an effect only with empty [data] datasets"
    ),
    "[data] mixture has an effect only with [data] datasets": Case(
        "--data.mixture x", "--data.mixture x: has an effect only with [data] datasets"
    ),
    "[data] text_field has an effect only with a jsonl, parquet, csv or huggingface dataset": Case(
        "--data.text_field body",
        "--data.text_field body: has an effect only with a jsonl, parquet, csv or huggingface dataset",
    ),
    "[data] columns has an effect only with a chat or preference dataset": Case(
        "--data.columns.question q", "--data.columns.question q: has an effect only with a chat or preference dataset"
    ),
    "[data] subset has an effect only with a huggingface, chat or preference dataset": Case(
        "--data.subset en", "--data.subset en: has an effect only with a huggingface, chat or preference dataset"
    ),
    "[data] split has an effect only with a huggingface, chat or preference dataset": Case(
        "--data.split test", "--data.split test: has an effect only with a huggingface, chat or preference dataset"
    ),
    "[data] token_dtype has an effect only with a tokens dataset": Case(
        "--data.token_dtype uint32", "--data.token_dtype uint32: has an effect only with a tokens dataset"
    ),
    "[data] chat_template has an effect only with a chat or preference dataset": Case(
        "--data.chat_template chatml",
        "--data.chat_template chatml: has an effect only with a chat or preference dataset",
    ),
    "[data] allowed_special has an effect only with a chat or preference dataset": Case(
        "--data.allowed_special x", "--data.allowed_special x: has an effect only with a chat or preference dataset"
    ),
    "[data] ignored_fields has an effect only with a chat or preference dataset": Case(
        "--data.ignored_fields x", "--data.ignored_fields x: has an effect only with a chat or preference dataset"
    ),
    "[data] long_documents has an effect only with [data] packing = best-fit or none": Case(
        "--data.long_documents drop",
        "--data.long_documents drop: has an effect only with [data] packing = best-fit or none",
    ),
    "[training] float8_exclude has an effect only with [training] float8": Case(
        "--training.float8_exclude x", "--training.float8_exclude x: has an effect only with [training] float8"
    ),
    "[training] z_loss has an effect only with [preference] loss = none": Case(
        "--data.dataset preference --data.path x --preference.loss orpo --training.z_loss 1",
        "--training.z_loss 1: has an effect only with [preference] loss = none",
    ),
    "[training] prediction_weight has an effect only with [preference] loss = none": Case(
        "--data.dataset preference --data.path x --preference.loss orpo --training.prediction_weight 1",
        "--training.prediction_weight 1: has an effect only with [preference] loss = none",
    ),
    "[training] prediction_weight has an effect only with layers for multi-token prediction (model.overrides.prediction_layers)": Case(
        "--model.name qwen3.5 --training.prediction_weight 0.3",
        "--training.prediction_weight 0.3: has an effect only with layers for multi-token prediction "
        "(model.overrides.prediction_layers) (qwen3.5/debug has none)",
        ranks=1,
    ),
    "[optimizer] muon_lr has an effect only with [optimizer] name = muon": Case(
        "--optimizer.muon_lr 1", "--optimizer.muon_lr 1: has an effect only with [optimizer] name = muon"
    ),
    "[optimizer] muon_momentum has an effect only with [optimizer] name = muon": Case(
        "--optimizer.muon_momentum 0.9",
        "--optimizer.muon_momentum 0.9: has an effect only with [optimizer] name = muon",
    ),
    "[optimizer] muon_nesterov has an effect only with [optimizer] name = muon": Case(
        "--optimizer.muon_nesterov false",
        "--optimizer.muon_nesterov false: has an effect only with [optimizer] name = muon",
    ),
    "[optimizer] muon_scale has an effect only with [optimizer] name = muon": Case(
        "--optimizer.muon_scale original",
        "--optimizer.muon_scale original: has an effect only with [optimizer] name = muon",
    ),
    "[optimizer] muon_coefficients has an effect only with [optimizer] name = muon": Case(
        "--optimizer.muon_coefficients polar_express",
        "--optimizer.muon_coefficients polar_express: has an effect only with [optimizer] name = muon",
    ),
    "[optimizer] muon_dtype has an effect only with [optimizer] name = muon": Case(
        "--optimizer.muon_dtype fp32", "--optimizer.muon_dtype fp32: has an effect only with [optimizer] name = muon"
    ),
    "[lora] alpha has an effect only with [lora] rank": Case(
        "--lora.alpha 8", "--lora.alpha 8: has an effect only with [lora] rank"
    ),
    "[lora] rslora has an effect only with [lora] rank": Case(
        "--lora.rslora true", "--lora.rslora true: has an effect only with [lora] rank"
    ),
    "[lora] dropout has an effect only with [lora] rank": Case(
        "--lora.dropout 0.1", "--lora.dropout 0.1: has an effect only with [lora] rank"
    ),
    "[lora] targets has an effect only with [lora] rank": Case(
        "--lora.targets x", "--lora.targets x: has an effect only with [lora] rank"
    ),
    "[lora] train_fully has an effect only with [lora] rank": Case(
        "--lora.train_fully x", "--lora.train_fully x: has an effect only with [lora] rank"
    ),
    "[lora] init has an effect only with [lora] rank": Case(
        "--lora.init gaussian", "--lora.init gaussian: has an effect only with [lora] rank"
    ),
    "[lora] init_from has an effect only with [lora] rank": Case(
        "--lora.init_from x", "--lora.init_from x: has an effect only with [lora] rank"
    ),
    "[lora] dtype has an effect only with [lora] rank": Case(
        "--lora.dtype bf16", "--lora.dtype bf16: has an effect only with [lora] rank"
    ),
    "[lora] base_dtype has an effect only with [lora] rank": Case(
        "--lora.base_dtype nf4", "--lora.base_dtype nf4: has an effect only with [lora] rank"
    ),
    "[preference] beta has an effect only with [preference] loss": Case(
        "--preference.beta 1", "--preference.beta 1: has an effect only with [preference] loss"
    ),
    "[preference] margin has an effect only with [preference] loss = simpo": Case(
        "--preference.margin 1", "--preference.margin 1: has an effect only with [preference] loss = simpo"
    ),
    "[lr_schedule] decay_steps has an effect only with [lr_schedule] name = warmup_stable_decay": Case(
        "--lr_schedule.decay_steps 5",
        "--lr_schedule.decay_steps 5: has an effect only with [lr_schedule] name = warmup_stable_decay",
    ),
    "[experts] balance_loss has an effect only with a model with experts": Case(
        "--experts.balance_loss 0.1",
        "--experts.balance_loss 0.1: has an effect only with a model with experts (llama3/debug has none)",
        ranks=1,
    ),
    "[experts] z_loss has an effect only with a model with experts": Case(
        "--experts.z_loss 0.1",
        "--experts.z_loss 0.1: has an effect only with a model with experts (llama3/debug has none)",
        ranks=1,
    ),
    "[experts] bias_rate has an effect only with a model with experts": Case(
        "--experts.bias_rate 0.1",
        "--experts.bias_rate 0.1: has an effect only with a model with experts (llama3/debug has none)",
        ranks=1,
    ),
    "[experts] bias_rate has an effect only with a model whose routers have a correction": Case(
        "--model.name olmoe --experts.bias_rate 0.1",
        "--experts.bias_rate 0.1: has an effect only with a model whose routers have a correction (those of olmoe/debug have none)",
        ranks=1,
    ),
    "[experts] center_bias has an effect only with [experts] bias_rate": Case(
        "--experts.center_bias true", "--experts.center_bias true: has an effect only with [experts] bias_rate"
    ),
    "[activation_checkpoint] offload_inputs has an effect only with [activation_checkpoint] mode = full": Case(
        "--activation_checkpoint.mode selective --activation_checkpoint.offload_inputs true",
        "--activation_checkpoint.offload_inputs true: has an effect only with [activation_checkpoint] mode = full",
    ),
    "[checkpoint] load_step has an effect only with [checkpoint] enabled": Case(
        "--checkpoint.enabled false --checkpoint.load_step 5",
        "--checkpoint.load_step 5: has an effect only with [checkpoint] enabled",
    ),
    "[checkpoint] init_averaged has an effect only with [checkpoint] init_from": Case(
        "--checkpoint.init_averaged true",
        "--checkpoint.init_averaged true: has an effect only with [checkpoint] init_from",
    ),
    "[checkpoint] resize_embeddings has an effect only with [checkpoint] init_from": Case(
        "--checkpoint.resize_embeddings true",
        "--checkpoint.resize_embeddings true: has an effect only with [checkpoint] init_from",
    ),
    "[checkpoint] init_exclude has an effect only with [checkpoint] init_from": Case(
        "--checkpoint.init_exclude x", "--checkpoint.init_exclude x: has an effect only with [checkpoint] init_from"
    ),
    "[checkpoint] mirror has an effect only with [checkpoint] enabled": Case(
        "--checkpoint.enabled false --checkpoint.mirror s3://bucket/x",
        "--checkpoint.mirror s3://bucket/x: has an effect only with [checkpoint] enabled",
    ),
    "[checkpoint] mirror_keep has an effect only with [checkpoint] mirror": Case(
        "--checkpoint.mirror_keep 2",
        "--checkpoint.mirror_keep 2: has an effect only with [checkpoint] mirror",
    ),
    "[checkpoint] mirror_pending has an effect only with [checkpoint] mirror": Case(
        "--checkpoint.mirror_pending 2",
        "--checkpoint.mirror_pending 2: has an effect only with [checkpoint] mirror",
    ),
    "[checkpoint] mirror_timeout_s has an effect only with [checkpoint] mirror": Case(
        "--checkpoint.mirror_timeout_s 5",
        "--checkpoint.mirror_timeout_s 5: has an effect only with [checkpoint] mirror",
    ),
    "[checkpoint] mirror_lease_s has an effect only with [checkpoint] mirror": Case(
        "--checkpoint.mirror_lease_s 5",
        "--checkpoint.mirror_lease_s 5: has an effect only with [checkpoint] mirror",
    ),
    "[checkpoint] mirror_mib_per_second has an effect only with [checkpoint] mirror": Case(
        "--checkpoint.mirror_mib_per_second 5",
        "--checkpoint.mirror_mib_per_second 5: has an effect only with [checkpoint] mirror",
    ),
    "[checkpoint] export_huggingface has an effect only with [checkpoint] enabled": Case(
        "--checkpoint.enabled false --checkpoint.export_huggingface true",
        "--checkpoint.export_huggingface true: has an effect only with [checkpoint] enabled",
    ),
    "[checkpoint] export_gguf has an effect only with [checkpoint] enabled": Case(
        "--checkpoint.enabled false --checkpoint.export_gguf f16",
        "--checkpoint.export_gguf f16: has an effect only with [checkpoint] enabled",
    ),
    "[checkpoint] export_averaged has an effect only with [checkpoint] export_huggingface or [checkpoint] export_gguf": Case(
        "--checkpoint.export_averaged true",
        "--checkpoint.export_averaged true: has an effect only with [checkpoint] export_huggingface or [checkpoint] export_gguf",
    ),
    "[checkpoint] export_averaged has an effect only with [optimizer] ema_decay": Case(
        "--checkpoint.export_huggingface true --checkpoint.export_averaged true",
        "--checkpoint.export_averaged true: has an effect only with [optimizer] ema_decay",
    ),
    "[checkpoint] export_checkpoint has an effect only with [checkpoint] export_huggingface or [checkpoint] export_gguf": Case(
        "--checkpoint.export_checkpoint best",
        "--checkpoint.export_checkpoint best: has an effect only with [checkpoint] export_huggingface or [checkpoint] export_gguf",
    ),
    "[evaluation] averaged has an effect only with [optimizer] ema_decay": Case(
        "--evaluation.averaged true", "--evaluation.averaged true: has an effect only with [optimizer] ema_decay"
    ),
    "[evaluation] keep_best_on has an effect only with [checkpoint] enabled": Case(
        "--checkpoint.enabled false --evaluation.keep_best_on held_out",
        "--evaluation.keep_best_on held_out: has an effect only with [checkpoint] enabled",
    ),
    "[evaluation] early_stopping_patience has an effect only with [evaluation] keep_best_on": Case(
        "--evaluation.early_stopping_patience 2",
        "--evaluation.early_stopping_patience 2: has an effect only with [evaluation] keep_best_on",
    ),
    "[evaluation] early_stopping_patience has an effect only with [evaluation] interval_steps": Case(
        "--evaluation.keep_best_on held_out --evaluation.interval_steps 0 --evaluation.early_stopping_patience 2",
        "--evaluation.early_stopping_patience 2: has an effect only with [evaluation] interval_steps",
    ),
    "[evaluation] early_stopping_min_delta has an effect only with [evaluation] early_stopping_patience": Case(
        "--evaluation.early_stopping_min_delta 0.1",
        "--evaluation.early_stopping_min_delta 0.1: has an effect only with [evaluation] early_stopping_patience",
    ),
    "[samples] interval_steps has an effect only with [samples] prompts": Case(
        "--samples.interval_steps 5", "--samples.interval_steps 5: has an effect only with [samples] prompts"
    ),
    "[samples] max_new_tokens has an effect only with [samples] prompts": Case(
        "--samples.max_new_tokens 5", "--samples.max_new_tokens 5: has an effect only with [samples] prompts"
    ),
    "[samples] temperature has an effect only with [samples] prompts": Case(
        "--samples.temperature 0", "--samples.temperature 0: has an effect only with [samples] prompts"
    ),
    "[samples] top_k has an effect only with [samples] prompts": Case(
        "--samples.top_k 5", "--samples.top_k 5: has an effect only with [samples] prompts"
    ),
    "[samples] top_p has an effect only with [samples] prompts": Case(
        "--samples.top_p 0.5", "--samples.top_p 0.5: has an effect only with [samples] prompts"
    ),
    "[samples] seed has an effect only with [samples] prompts": Case(
        "--samples.seed 3", "--samples.seed 3: has an effect only with [samples] prompts"
    ),
    "[metrics] project has an effect only with [metrics] sinks = wandb, mlflow or trackio": Case(
        "--metrics.project p", "--metrics.project p: has an effect only with [metrics] sinks = wandb, mlflow or trackio"
    ),
    "[metrics] run_name has an effect only with [metrics] sinks = wandb, mlflow or trackio": Case(
        "--metrics.run_name r",
        "--metrics.run_name r: has an effect only with [metrics] sinks = wandb, mlflow or trackio",
    ),
    "[metrics] tags has an effect only with [metrics] sinks = wandb, mlflow or trackio": Case(
        "--metrics.tags t", "--metrics.tags t: has an effect only with [metrics] sinks = wandb, mlflow or trackio"
    ),
    "[metrics] notes has an effect only with [metrics] sinks = wandb, mlflow or trackio": Case(
        "--metrics.notes n", "--metrics.notes n: has an effect only with [metrics] sinks = wandb, mlflow or trackio"
    ),
    "[metrics] entity has an effect only with [metrics] sinks = wandb": Case(
        "--metrics.entity e", "--metrics.entity e: has an effect only with [metrics] sinks = wandb"
    ),
    "[metrics] mlflow_tracking_uri has an effect only with [metrics] sinks = mlflow": Case(
        "--metrics.mlflow_tracking_uri u",
        "--metrics.mlflow_tracking_uri u: has an effect only with [metrics] sinks = mlflow",
    ),
    "[profiling] num_steps has an effect only with [profiling] first_step": Case(
        "--profiling.num_steps 2", "--profiling.num_steps 2: has an effect only with [profiling] first_step"
    ),
    "[profiling] rank has an effect only with [profiling] first_step": Case(
        "--profiling.rank 1", "--profiling.rank 1: has an effect only with [profiling] first_step"
    ),
    "[profiling] memory_snapshot has an effect only with [profiling] first_step": Case(
        "--profiling.memory_snapshot true",
        "--profiling.memory_snapshot true: has an effect only with [profiling] first_step",
    ),
    "[profiling] memory_snapshot has an effect only with a GPU": Case(
        "--profiling.first_step 1 --profiling.memory_snapshot true --run.device cpu",
        "--profiling.memory_snapshot true: has an effect only with a GPU",
        ranks=1,
    ),
    "[resilience] on_max_skips has an effect only with [checkpoint] enabled": Case(
        "--checkpoint.enabled false --resilience.on_max_skips rollback",
        "--resilience.on_max_skips rollback: has an effect only with [checkpoint] enabled",
    ),
    "[model] revision is incompatible with a path as [model] pretrained": Case(
        "--model.pretrained docs --model.size debug --model.revision v1",
        "--model.revision v1: is incompatible with a path as [model] pretrained: only models of the Hub have revisions",
    ),
    "[tokenizer] backend != default needs [tokenizer] path": Case(
        "--tokenizer.backend tiktoken",
        "--tokenizer.backend tiktoken: needs [tokenizer] path: only the default one is shipped",
    ),
    "[data] path needs the type of its files": Case(
        "--data.path my.txt",
        "--data.path my.txt: needs the type of its files (set [data] dataset to text): a path does not tell how its files are read",
    ),
    "[data] dataset = text, jsonl, parquet, csv, huggingface, tokens or prepared needs [data] path": Case(
        "--data.dataset jsonl", "--data.dataset jsonl: needs [data] path: it names the files"
    ),
    "a preference dataset needs [preference] loss": Case(
        "--data.dataset preference --data.path x",
        "--data.dataset preference: needs [preference] loss: a pair is no document to train on",
    ),
    "a dataset that is not preference or prepared is incompatible with [preference] loss": Case(
        "--data.dataset chat --data.path x --preference.loss orpo",
        "--data.dataset chat: is incompatible with [preference] loss: such a loss compares pairs of answers",
    ),
    "[preference] loss needs [data] packing = best-fit or none": Case(
        "--data.dataset preference --data.path x --preference.loss orpo",
        "--preference.loss orpo: needs [data] packing = best-fit or none: a sample contains complete pairs",
    ),
    "[preference] loss needs [data] long_documents = drop": Case(
        "--data.dataset preference --data.path x --preference.loss orpo --data.packing none",
        "--preference.loss orpo: needs [data] long_documents = drop: pairs are not divided",
    ),
    "[preference] loss needs [data] document_mask": Case(
        "--data.dataset preference --data.path x --preference.loss orpo --data.packing none --data.long_documents drop",
        "--preference.loss orpo: needs [data] document_mask: the answers of a sample are independent",
    ),
    "[preference] loss = dpo or ipo needs [checkpoint] init_from": Case(
        "--data.dataset preference --data.path x --preference.loss ipo --data.packing none --data.long_documents drop --data.document_mask true",
        "--preference.loss ipo: needs [checkpoint] init_from: the loss compares the model with its initial weights",
    ),
    "[training] epochs is incompatible with [training] steps": Case(
        "--training.steps 7 --training.epochs 3",
        "--training.epochs 3: is incompatible with [training] steps (steps = 7 is set too): both are the length of the run; remove one of them",
    ),
    "[training] float8 is incompatible with [lora] base_dtype != keep": Case(
        "--training.float8 rowwise --lora.rank 4 --lora.base_dtype nf4 --checkpoint.init_from .",
        "--training.float8 rowwise: is incompatible with [lora] base_dtype != keep: products with matrices in 4 bits dequantize them",
    ),
    "[training] float8 needs a device with products in float8": Case(
        "--training.float8 rowwise",
        "--training.float8 rowwise: needs a device with products in float8 (A100 has none): all products of the blocks are in float8",
        facts={facts.FLOAT8_DEVICE: Known(False, "A100 has none")},
    ),
    "[training] float8 needs [training] compute_dtype = bf16 with products on a GPU": Case(
        "--training.float8 rowwise --training.compute_dtype fp32",
        "--training.float8 rowwise: needs [training] compute_dtype = bf16 with products on a GPU: such kernels return bf16",
        facts={facts.FLOAT8_GPU: Known(True)},
    ),
    "[training] z_loss is incompatible with an objective of your own": Case(
        "--training.z_loss 0.1",
        "--training.z_loss 0.1: is incompatible with an objective of your own: an objective computes its own loss",
        facts={facts.OWN_OBJECTIVE: Known(True)},
    ),
    "[training] prediction_weight is incompatible with an objective of your own": Case(
        "--training.prediction_weight 0.1",
        "--training.prediction_weight 0.1: is incompatible with an objective of your own: an objective computes its own loss",
        facts={facts.OWN_OBJECTIVE: Known(True)},
    ),
    "[training] prediction_weight is incompatible with [lora] rank": Case(
        "--lora.rank 4 --checkpoint.init_from . --training.prediction_weight 0.1",
        "--training.prediction_weight 0.1: is incompatible with [lora] rank: no reader of adapters knows the layers for "
        "multi-token prediction",
    ),
    "[lora] rank needs [checkpoint] init_from": Case(
        "--lora.rank 4", "--lora.rank 4: needs [checkpoint] init_from: adapters change a trained model"
    ),
    "[lora] rank is incompatible with [parallel] reshard_after_forward != default, always or never": Case(
        "--lora.rank 4 --parallel.reshard_after_forward 2 --checkpoint.init_from .",
        "--lora.rank 4: is incompatible with [parallel] reshard_after_forward != default, always or never: frozen units have no backward, and torch gathers the wrong shards of such units",
    ),
    "[checkpoint] init_exclude is incompatible with [lora] rank": Case(
        "--lora.rank 4 --checkpoint.init_exclude x --checkpoint.init_from .",
        "--checkpoint.init_exclude x: is incompatible with [lora] rank: the base model stays unchanged",
    ),
    "[checkpoint] init_averaged is incompatible with [lora] rank": Case(
        "--lora.rank 4 --checkpoint.init_averaged true --checkpoint.init_from .",
        "--checkpoint.init_averaged true: is incompatible with [lora] rank: scripts/convert_hf.py to-hf --averaged writes a base model",
    ),
    "[lora] dropout is incompatible with adapters of experts": Case(
        "--model.name mixtral --lora.rank 4 --lora.dropout 0.1 --checkpoint.init_from .",
        "--lora.dropout 0.1: is incompatible with adapters of experts (such as layers.0.feed_forward.experts.w1): they have no dropout; see [lora] targets",
        ranks=1,
    ),
    "[lora] base_dtype != keep is incompatible with a trained matrix of the blocks": Case(
        "--lora.rank 4 --lora.base_dtype nf4 --lora.targets *.wq --lora.train_fully layers.1.feed_forward.w1 --model.overrides.hidden_dim 384 --checkpoint.init_from .",
        "--lora.base_dtype nf4: is incompatible with a trained matrix of the blocks (layers.1.feed_forward.w1, see [lora] train_fully): base_dtype keeps it in 4 bits",
        ranks=1,
    ),
    "[lora] base_dtype != keep needs torch >= 2.12 with FSDP": Case(
        "--lora.rank 4 --lora.base_dtype nf4 --checkpoint.init_from .",
        "--lora.base_dtype nf4: needs torch >= 2.12 with FSDP (2.11.0 is installed): one rank and tp alone need no FSDP",
        facts={facts.FSDP: Known(True), facts.TORCH_2_12: Known(False, "2.11.0 is installed")},
    ),
    "[checkpoint] resize_embeddings is incompatible with a frozen matrix with a row for each token": Case(
        "--lora.rank 4 --checkpoint.resize_embeddings true --lora.train_fully output --checkpoint.init_from .",
        "--checkpoint.resize_embeddings true: is incompatible with a frozen matrix with a row for each token ([lora] train_fully must include tok_embeddings,output): the rows of new tokens would stay untrained",
        ranks=1,
    ),
    "[checkpoint] export_huggingface is incompatible with parameters that peft cannot train alone": Case(
        "--lora.rank 4 --checkpoint.export_huggingface true --model.overrides.tied_embeddings true --lora.train_fully tok_embeddings --checkpoint.init_from .",
        "--checkpoint.export_huggingface true: is incompatible with parameters that peft cannot train alone (tok_embeddings.weight is also the output weight, and peft cannot train tied embeddings): scripts/convert_hf.py merge writes the complete model",
        ranks=1,
    ),
    "[experts] bias_rate is incompatible with [lora] rank": Case(
        "--model.name deepseek-v3 --lora.rank 4 --experts.bias_rate 0.1 --checkpoint.init_from .",
        "--experts.bias_rate 0.1: is incompatible with [lora] rank: the correction belongs to the base model, which is frozen",
    ),
    "[optimizer] offload is incompatible with [parallel] cpu_offload": Case(
        "--optimizer.offload state --parallel.cpu_offload true",
        "--optimizer.offload state: is incompatible with [parallel] cpu_offload: cpu_offload already keeps the optimizer state on the host",
    ),
    "[optimizer] offload = state_and_gradients is incompatible with [training] reduce_every_microbatch": Case(
        "--optimizer.offload state_and_gradients --training.reduce_every_microbatch true",
        "--optimizer.offload state_and_gradients: is incompatible with [training] reduce_every_microbatch: only complete gradients can be offloaded",
    ),
    "[optimizer] offload = state_and_gradients is incompatible with a comparison of gradients": Case(
        "--optimizer.offload state_and_gradients",
        "--optimizer.offload state_and_gradients: is incompatible with a comparison of gradients: none are left after a step",
        facts={facts.GRADIENTS_COMPARED: Known(True)},
    ),
    "[optimizer] in_backward is incompatible with [training] max_norm": Case(
        "--optimizer.in_backward true",
        "--optimizer.in_backward true: is incompatible with [training] max_norm: clipping needs all gradients at once; set max_norm to none",
    ),
    "[optimizer] in_backward is incompatible with [training] reduce_every_microbatch": Case(
        "--optimizer.in_backward true --training.max_norm none --training.reduce_every_microbatch true",
        "--optimizer.in_backward true: is incompatible with [training] reduce_every_microbatch: only the last microbatch completes gradients",
    ),
    "[optimizer] in_backward is incompatible with [optimizer] offload": Case(
        "--optimizer.in_backward true --training.max_norm none --optimizer.offload state",
        "--optimizer.in_backward true: is incompatible with [optimizer] offload: offload updates parameters only after backward",
    ),
    "[optimizer] in_backward is incompatible with [parallel] cpu_offload": Case(
        "--optimizer.in_backward true --training.max_norm none --parallel.cpu_offload true",
        "--optimizer.in_backward true: is incompatible with [parallel] cpu_offload: cpu_offload copies gradients to the host too late",
    ),
    "[optimizer] in_backward is incompatible with [resilience] on_loss_spike": Case(
        "--optimizer.in_backward true --training.max_norm none --resilience.on_loss_spike skip",
        "--optimizer.in_backward true: is incompatible with [resilience] on_loss_spike: a spike skips a complete step",
    ),
    "[optimizer] in_backward is incompatible with [resilience] max_consecutive_skips > 1": Case(
        "--optimizer.in_backward true --training.max_norm none",
        "--optimizer.in_backward true: is incompatible with [resilience] max_consecutive_skips > 1: no step can be skipped",
    ),
    "[optimizer] in_backward is incompatible with a comparison of gradients": Case(
        "--optimizer.in_backward true --training.max_norm none --resilience.max_consecutive_skips 1",
        "--optimizer.in_backward true: is incompatible with a comparison of gradients: none are left after a step",
        facts={facts.GRADIENTS_COMPARED: Known(True)},
    ),
    "[optimizer] name = muon is incompatible with [optimizer] offload": Case(
        "--optimizer.name muon --optimizer.offload state",
        "--optimizer.name muon: is incompatible with [optimizer] offload: Muon needs whole matrices on the device",
    ),
    "[optimizer] name = muon is incompatible with [parallel] cpu_offload": Case(
        "--optimizer.name muon --parallel.cpu_offload true",
        "--optimizer.name muon: is incompatible with [parallel] cpu_offload: Muon needs whole matrices on the device",
    ),
    "[optimizer] name = muon is incompatible with [optimizer] in_backward": Case(
        "--optimizer.name muon --optimizer.in_backward true --training.max_norm none --resilience.max_consecutive_skips 1",
        "--optimizer.name muon: is incompatible with [optimizer] in_backward: Muon exchanges the matrices of all blocks at once",
    ),
    "[optimizer] name = muon is incompatible with [optimizer] state_dtype = 8bit": Case(
        "--optimizer.name muon --optimizer.state_dtype 8bit",
        "--optimizer.name muon: is incompatible with [optimizer] state_dtype = 8bit: only the moments of AdamW are quantized",
    ),
    "[optimizer] name = muon is incompatible with [lora] rank": Case(
        "--optimizer.name muon --lora.rank 4 --checkpoint.init_from .",
        "--optimizer.name muon: is incompatible with [lora] rank: nobody has shown a gain on adapters",
    ),
    "[optimizer] name = muon needs a matrix that no group gives to adamw": Case(
        '--optimizer.name muon --optimizer.groups.layers.* {optimizer="adamw"}',
        "--optimizer.name muon: needs a matrix that no group gives to adamw: it would update nothing",
        ranks=1,
    ),
    "optimizer = muon in [optimizer] groups needs [optimizer] name = muon": Case(
        '--optimizer.groups.*.wq.weight {optimizer="muon"}',
        '--optimizer.groups.*.wq.weight {optimizer="muon"}: needs [optimizer] name = muon: other groups may then have optimizer = adamw',
    ),
    "[optimizer] cautious_decay needs a trained parameter with weight decay": Case(
        "--optimizer.cautious_decay true --optimizer.weight_decay 0",
        "--optimizer.cautious_decay true: needs a trained parameter with weight decay: it would change nothing",
        ranks=1,
    ),
    "[optimizer] base_width is incompatible with [lora] rank": Case(
        "--optimizer.base_width 32 --lora.rank 4 --checkpoint.init_from .",
        "--optimizer.base_width 32: is incompatible with [lora] rank: the matrices of adapters do not have the width of the model",
    ),
    "[optimizer] base_width is incompatible with a model with tied embeddings": Case(
        "--optimizer.base_width 32 --model.overrides.tied_embeddings true",
        "--optimizer.base_width 32: is incompatible with a model with tied embeddings: at larger widths, the output needs smaller values and rates, the embedding does not; set [model] overrides.tied_embeddings = false",
        ranks=1,
    ),
    "[lr_schedule] name = range_test needs [lr_schedule] min_lr_ratio": Case(
        "--lr_schedule.name range_test --lr_schedule.min_lr_ratio 0",
        "--lr_schedule.name range_test: needs [lr_schedule] min_lr_ratio: the rate rises from this fraction of the peak",
    ),
    "[lr_schedule] name = range_test is incompatible with [lr_schedule] warmup_steps": Case(
        "--lr_schedule.name range_test --lr_schedule.warmup_steps 3",
        "--lr_schedule.name range_test: is incompatible with [lr_schedule] warmup_steps: the test is itself a rise",
    ),
    "[lr_schedule] name = warmup_stable_decay needs [lr_schedule] decay_steps": Case(
        "--lr_schedule.name warmup_stable_decay",
        "--lr_schedule.name warmup_stable_decay: needs [lr_schedule] decay_steps: it ends with this decay",
    ),
    "[parallel] ep > 1 needs a model with experts": Case(
        "--parallel.ep 3",
        "--parallel.ep 3: needs a model with experts (llama3/debug has none): ep distributes experts",
        ranks=1,
    ),
    "[parallel] pp > 1 is incompatible with [training] reduce_every_microbatch": Case(
        "--parallel.pp 2 --training.reduce_every_microbatch true",
        "--parallel.pp 2: is incompatible with [training] reduce_every_microbatch: a pipeline reduces gradients once per step",
    ),
    "[parallel] pp > 1 needs torch >= 2.13 with [training] prediction_weight": Case(
        "--parallel.pp 2 --model.name glm-4.5 --model.overrides.prediction_layers 1 --training.prediction_weight 0.1",
        "--parallel.pp 2: needs torch >= 2.13 with [training] prediction_weight (2.11.0 is installed): older versions of FSDP wait "
        "for the embedding, which evaluations do not run in the last stage",
        facts={facts.PREDICTS: Known(True), facts.TORCH_2_13: Known(False, "2.11.0 is installed")},
    ),
    "a pipeline whose first and last stage share a table is incompatible with [optimizer] in_backward": Case(
        "--parallel.pp 2 --model.overrides.tied_embeddings true --optimizer.in_backward true --training.max_norm none "
        "--resilience.max_consecutive_skips 1",
        "--parallel.pp 2: is incompatible with [optimizer] in_backward: the gradients of both stages are added after backward",
        ranks=2,
    ),
    "a pipeline whose first and last stage share a table is incompatible with [optimizer] offload = state_and_gradients": Case(
        "--parallel.pp 2 --model.overrides.tied_embeddings true --optimizer.offload state_and_gradients",
        "--parallel.pp 2: is incompatible with [optimizer] offload = state_and_gradients: the gradients of both stages are added "
        "after backward",
        ranks=2,
    ),
    "a pipeline that computes gradients of inputs and weights separately needs torch >= 2.13": Case(
        "--parallel.pp 2 --parallel.pipeline_schedule ZBVZeroBubble",
        "--parallel.pipeline_schedule ZBVZeroBubble: needs torch >= 2.13 (2.11.0 is installed): older versions cannot split a backward with functions written in Python",
        facts={facts.SPLITS_BACKWARD: Known(True), facts.TORCH_2_13: Known(False, "2.11.0 is installed")},
    ),
    "a pipeline that computes gradients of inputs and weights separately is incompatible with [training] prediction_weight": Case(
        "--parallel.pp 2 --parallel.pipeline_schedule ZBVZeroBubble --model.name glm-4.5 --model.overrides.prediction_layers 1 "
        "--training.prediction_weight 0.3",
        "--parallel.pipeline_schedule ZBVZeroBubble: is incompatible with [training] prediction_weight: torch would run parts of the "
        "last stage's backward twice, in which the embedding has several uses",
        ranks=2,
    ),
    "a pipeline that computes gradients of inputs and weights separately is incompatible with compiled blocks ([compile] enabled)": Case(
        "--parallel.pp 2 --parallel.pipeline_schedule ZBVZeroBubble --compile.enabled true",
        "--parallel.pipeline_schedule ZBVZeroBubble: is incompatible with compiled blocks ([compile] enabled): torch.compile does not support it",
        ranks=2,
    ),
    "a pipeline that computes gradients of inputs and weights separately is incompatible with [activation_checkpoint] mode = selective": Case(
        "--parallel.pp 2 --parallel.pipeline_schedule ZBVZeroBubble --activation_checkpoint.mode selective",
        "--parallel.pipeline_schedule ZBVZeroBubble: is incompatible with [activation_checkpoint] mode = selective: the schedule traverses the backward graph twice",
        ranks=2,
    ),
    "a pipeline that computes gradients of inputs and weights separately needs [parallel] reshard_after_forward = default or never": Case(
        "--parallel.pp 2 --parallel.pipeline_schedule ZBVZeroBubble --parallel.reshard_after_forward always",
        "--parallel.pipeline_schedule ZBVZeroBubble: needs [parallel] reshard_after_forward = default or never: the schedule uses weights again later",
        ranks=2,
    ),
    "[activation_checkpoint] mode = budget needs compiled blocks ([compile] enabled)": Case(
        "--activation_checkpoint.mode budget --compile.enabled false",
        "--activation_checkpoint.mode budget: needs compiled blocks ([compile] enabled): the compiler applies the budget",
        ranks=1,
    ),
    "[activation_checkpoint] mode = budget is incompatible with a plan": Case(
        "--activation_checkpoint.mode budget",
        "--activation_checkpoint.mode budget: is incompatible with a plan: the compiler selects the activations to save",
        facts={facts.PLANNED: Known(True)},
    ),
    "[parallel] async_tensor_parallel needs compiled blocks ([compile] enabled) with [parallel] tp > 1": Case(
        "--parallel.tp 2 --parallel.async_tensor_parallel true --run.device cpu --compile.enabled false",
        "--parallel.async_tensor_parallel true: needs compiled blocks ([compile] enabled) with [parallel] tp > 1: the compiler overlaps the communication",
        ranks=2,
    ),
    "[parallel] async_tensor_parallel needs [parallel] sequence_parallel with [parallel] tp > 1": Case(
        "--parallel.tp 2 --parallel.async_tensor_parallel true --run.device cpu --compile.enabled true --parallel.sequence_parallel false",
        "--parallel.async_tensor_parallel true: needs [parallel] sequence_parallel with [parallel] tp > 1: gathers of the sequence are what is overlapped",
        ranks=2,
    ),
    "[parallel] async_tensor_parallel needs a GPU with [parallel] tp > 1": Case(
        "--parallel.tp 2 --parallel.async_tensor_parallel true --run.device cpu --compile.enabled true",
        "--parallel.async_tensor_parallel true: needs a GPU with [parallel] tp > 1: the overlapped gathers use symmetric memory",
        ranks=2,
    ),
    "[evaluation] interval_steps needs [data] held_out_fraction, [evaluation] datasets or [evaluation] tasks": Case(
        "--data.held_out_fraction 0 --evaluation.tasks {}",
        f"{ROOT}/train_configs/debug.toml [evaluation] interval_steps = 100: needs [data] held_out_fraction, [evaluation] datasets or [evaluation] tasks: without evaluation, set interval_steps = 0",
    ),
    "[evaluation] averaged needs [evaluation] interval_steps or [samples] prompts": Case(
        "--optimizer.ema_decay 0.9 --evaluation.averaged true --evaluation.interval_steps 0",
        "--evaluation.averaged true: needs [evaluation] interval_steps or [samples] prompts: only evaluations, tasks and samples use these weights",
    ),
    "[checkpoint] load_step = best needs [evaluation] keep_best_on": Case(
        "--checkpoint.load_step best",
        "--checkpoint.load_step best: needs [evaluation] keep_best_on: evaluations choose the best checkpoint",
    ),
    "[checkpoint] load_step = best needs [evaluation] interval_steps": Case(
        "--checkpoint.load_step best --evaluation.keep_best_on held_out --evaluation.interval_steps 0",
        "--checkpoint.load_step best: needs [evaluation] interval_steps: evaluations choose the best checkpoint",
    ),
    "[checkpoint] export_checkpoint = best needs [evaluation] keep_best_on": Case(
        "--checkpoint.export_huggingface true --checkpoint.export_checkpoint best",
        "--checkpoint.export_checkpoint best: needs [evaluation] keep_best_on: evaluations choose the best checkpoint",
    ),
    "[checkpoint] export_checkpoint = best needs [evaluation] interval_steps": Case(
        "--checkpoint.export_huggingface true --checkpoint.export_checkpoint best --evaluation.keep_best_on held_out --evaluation.interval_steps 0",
        "--checkpoint.export_checkpoint best: needs [evaluation] interval_steps: evaluations choose the best checkpoint",
    ),
    "[checkpoint] export_averaged needs [evaluation] averaged with an export of the best checkpoint": Case(
        "--checkpoint.export_huggingface true --checkpoint.export_checkpoint best --evaluation.keep_best_on held_out --optimizer.ema_decay 0.9 --checkpoint.export_averaged true",
        "--checkpoint.export_averaged true: needs [evaluation] averaged with an export of the best checkpoint: the best weights are those evaluated; export_checkpoint = last needs neither",
    ),
    "[evaluation] averaged needs [checkpoint] export_averaged with an export of the best checkpoint": Case(
        "--checkpoint.export_huggingface true --checkpoint.export_checkpoint best --evaluation.keep_best_on held_out --optimizer.ema_decay 0.9 --evaluation.averaged true",
        "--evaluation.averaged true: needs [checkpoint] export_averaged with an export of the best checkpoint: the best weights are those evaluated; export_checkpoint = last needs neither",
    ),
    "[resilience] on_loss_spike = rollback needs [checkpoint] enabled": Case(
        "--checkpoint.enabled false --resilience.on_loss_spike rollback",
        "--resilience.on_loss_spike rollback: needs [checkpoint] enabled: it resumes from a checkpoint",
    ),
    "[metrics] sinks = tensorboard needs [metrics] sinks = jsonl": Case(
        "--metrics.sinks console,tensorboard",
        "--metrics.sinks console,tensorboard: needs [metrics] sinks = jsonl: it delivers the records of metrics.jsonl",
    ),
    "[metrics] sinks = wandb needs [metrics] sinks = jsonl": Case(
        "--metrics.sinks console,wandb",
        "--metrics.sinks console,wandb: needs [metrics] sinks = jsonl: it delivers the records of metrics.jsonl",
    ),
    "[metrics] sinks = mlflow needs [metrics] sinks = jsonl": Case(
        "--metrics.sinks console,mlflow",
        "--metrics.sinks console,mlflow: needs [metrics] sinks = jsonl: it delivers the records of metrics.jsonl",
    ),
    "[metrics] sinks = trackio needs [metrics] sinks = jsonl": Case(
        "--metrics.sinks console,trackio",
        "--metrics.sinks console,trackio: needs [metrics] sinks = jsonl: it delivers the records of metrics.jsonl",
    ),
    "a sweep needs [metrics] sinks = jsonl": Case(
        "--metrics.sinks console",
        "--metrics.sinks console: needs [metrics] sinks = jsonl: it compares the records of metrics.jsonl",
        facts={facts.SWEPT: Known(True)},
    ),
    "[checkpoint] init_from is incompatible with a comparison of widths": Case(
        "--checkpoint.init_from .",
        "--checkpoint.init_from .: is incompatible with a comparison of widths: models of other widths start from random weights",
        facts={facts.WIDTHS_COMPARED: Known(True)},
    ),
    "[lora] rank is incompatible with --reference transformers": Case(
        "--lora.rank 4 --checkpoint.init_from .",
        "--lora.rank 4: is incompatible with --reference transformers: transformers has no adapters; compare with one rank",
        facts={facts.TRANSFORMERS: Known(True)},
    ),
    "[preference] loss is incompatible with --reference transformers": Case(
        "--data.dataset preference --data.path x --preference.loss orpo --data.packing none --data.long_documents drop --data.document_mask true",
        "--preference.loss orpo: is incompatible with --reference transformers: transformers has no preference losses; compare with one rank",
        facts={facts.TRANSFORMERS: Known(True)},
    ),
    "[experts] balance_loss is incompatible with --reference transformers": Case(
        "--experts.balance_loss 0.1",
        "--experts.balance_loss 0.1: is incompatible with --reference transformers: transformers defines the losses of routers otherwise",
        facts={facts.TRANSFORMERS: Known(True)},
    ),
    "[experts] z_loss is incompatible with --reference transformers": Case(
        "--experts.z_loss 0.1",
        "--experts.z_loss 0.1: is incompatible with --reference transformers: transformers defines the losses of routers otherwise",
        facts={facts.TRANSFORMERS: Known(True)},
    ),
    "[training] float8 is incompatible with --reference transformers": Case(
        "--training.float8 rowwise",
        "--training.float8 rowwise: is incompatible with --reference transformers: transformers has no float8",
        facts={facts.TRANSFORMERS: Known(True)},
    ),
    "[training] prediction_weight is incompatible with --reference transformers": Case(
        "--training.prediction_weight 0.1",
        "--training.prediction_weight 0.1: is incompatible with --reference transformers: transformers does not train layers for "
        "multi-token prediction",
        facts={facts.TRANSFORMERS: Known(True)},
    ),
}
"""Row -> what provokes it, and the line that a user sees."""


def test_each_row_has_a_case():
    assert [*CASES] == [str(row) for row in rows()]


@pytest.mark.parametrize("row", CASES)
def test_a_broken_row_is_one_line(row):
    case = CASES[row]
    if "a pipeline that computes" in row and not case.facts and torch.__version__ < (2, 13):
        pytest.skip("torch cannot run this schedule, which is another row")
    with pytest.raises(ConfigError) as error:
        config = load_config(case.argv.split(), check_files=())
        with config.explained_errors():
            if case.facts:
                check(config, case.facts)
            elif case.ranks:
                resolve(config, case.ranks)
    assert str(error.value) == case.line
    assert next(other for other in rows() if str(other) == row).rule in case.line


def conditions(row):
    members = [row.first, row.second, *filter(None, [row.given])]
    return [inner for member in members for inner in getattr(member, "members", (member,))]


def literals(annotation):
    """Return the values of all literals in a type, such as those of the elements of a tuple."""
    inner = typing.get_args(annotation)
    return {*inner} if typing.get_origin(annotation) is typing.Literal else {v for a in inner for v in literals(a)}


def test_conditions_name_settings_and_values_that_exist():
    used = [s.constraint.used_with for s in settings().values() if s.constraint.used_with]
    for condition in [*used, *(c for row in rows() for c in conditions(row))]:
        if isinstance(condition, When):
            setting = settings()[condition.setting]
            allowed = literals(setting.type)
            assert not allowed or set(condition.values) <= allowed


def test_a_setting_says_what_the_table_says_about_it():
    assert restrictions("lora.base_dtype") == [
        "only with [lora] rank",
        "!= keep not with [training] float8 and a trained matrix of the blocks",
        "!= keep needs torch >= 2.12 with FSDP",
    ]
    assert restrictions("optimizer.offload") == [
        "not with [parallel] cpu_offload, [optimizer] in_backward and [optimizer] name = muon",
        "= state_and_gradients not with [training] reduce_every_microbatch, a comparison of gradients and a pipeline whose first and "
        "last stage share a table",
    ]


def test_every_fact_is_used_by_a_row():
    used = {fact for row in rows() for fact in row.facts}
    assert used == {fact for fact in vars(facts).values() if isinstance(fact, Fact)}


def test_no_reason_is_missing_and_no_row_stands_twice():
    names = [str(row) for row in rows()]
    assert len({*names}) == len(names)
    assert all(row.reason or "only with" in row.rule for row in rows())
    assert not [row.reason for row in rows() if re.search(r"[.:]$", row.reason)]
