"""Declarations of all settings of a run: type, default, unit, range and meaning. A setting is a field of a section.

These declarations are used by the TOML and command-line parsers, the checks of values, `--help` and docs/configuration.md.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer.system.streams import printable


class ConfigError(Exception):
    """Error about a setting whose value cannot be used. Commands print it as one line and exit with code 2.

    key: "section.name" of the setting, or "" if `message` is already the complete line.
    message: the broken rule. `Config.explain` prepends the value and its origin.
    """

    def __init__(self, key: str, message: str):
        self.key = key
        self.message = printable(message)
        super().__init__(f"{key}: {self.message}" if key else self.message)

    def __reduce__(self) -> tuple:
        return ConfigError, (self.key, self.message)  # worker processes raise it too


@contextmanager
def errors_about(key: str) -> Iterator[None]:
    """Context manager whose body raises a ConfigError about this setting instead of one about another, or about a path alone."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(key, error.message) from None


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Restrictions on one setting. `min` and `max` are inclusive."""

    min: float | None = None
    exclusive_min: float | None = None
    max: float | None = None
    unit: str = ""
    fixed_on_resume: bool = False
    """Whether the saved state depends on the setting. If so, a run can resume only with the value in the checkpoint."""
    per_node: bool = False
    """Whether the nodes of one run may have different values."""
    multiline: bool = False
    """Whether a text may contain line breaks and tabs."""
    free_keys: bool = False
    """Whether the keys of the table may be any printable text."""
    only_with: str = ""
    """Conditions under which the setting may differ from its default, joined by "and". `_holds` in load.py lists their forms."""
    used_with: str = ""
    """Condition under which the setting has an effect. Otherwise the setting is ignored without an error."""


FIXED = Constraint(fixed_on_resume=True)
PER_NODE = Constraint(per_node=True)
PIPELINE = Constraint(used_with="[parallel] pp > 1")
SELECTIVE = Constraint(used_with="[activation_checkpoint] mode = selective")
PROFILED = Constraint(only_with="[profiling] first_step")
SAVING = Constraint(used_with="[checkpoint] enabled")
NAMED_MODEL = Constraint(used_with="empty [model] huggingface")
INITIALIZED = Constraint(only_with="[checkpoint] init_from")
ADAPTED = Constraint(only_with="[lora] rank")
SENT = Constraint(only_with="[metrics] sinks = wandb or mlflow or trackio")
PROMPTED = Constraint(only_with="[samples] prompts")
PREFERRED = Constraint(only_with="[preference] loss != none")

MESSAGE_COLUMNS = ("role", "content")
DOCUMENT_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "question", "answer", "chosen",
    "rejected", "system", "tools",
)  # fmt: skip
"""Fields of conversations that data.columns may give other names."""
MESSAGE_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Those that hold messages, or a text."""

Count = Annotated[int, Constraint(min=1, max=4096)]
CountOrZero = Annotated[int, Constraint(min=0, max=4096)]
Steps = Annotated[int, Constraint(min=1, max=10**12, unit="steps")]
StepsOrZero = Annotated[int, Constraint(min=0, max=10**12, unit="steps")]
Samples = Annotated[int, Constraint(min=1, max=10**7, unit="samples")]
Seconds = Annotated[float, Constraint(min=1, max=10**7, unit="seconds")]
Degree = Annotated[int, Constraint(min=1, max=10**6, unit="ranks")]
Fraction = Annotated[float, Constraint(min=0, max=1)]
DeviceChoice = Literal["auto", "gpu", "cpu"]
ModelFamily = Literal[
    "llama2", "llama3", "llama3.1", "llama3.2", "qwen2.5", "qwen3", "mistral", "ministral3", "smollm3", "olmo2", "olmo3",
    "granite3", "gemma2", "gemma3", "phi", "mixtral", "olmoe", "qwen3-moe", "gpt-oss",
]  # fmt: skip
"""The keys of MODELS in models/__init__.py, which imports torch."""
Saveable = Literal["matmuls", "attention", "reduce_scatters", "exchanges"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = ""
    """Name of this run's folder inside output_folder. Empty: the name of the configuration file."""
    output_folder: str = "outputs"
    """Path of the folder that contains the run folders."""
    seed: Annotated[int, Constraint(min=0, max=2**63 - 1, fixed_on_resume=True)] = 0
    """Seed of the initial weights and of the sample order."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Whether to make results bitwise reproducible, at some cost of speed on GPUs. "auto" means "on" on CPUs, "off" on GPUs."""
    device: DeviceChoice = "auto"
    """Device to train on. "auto": each rank's GPU, or the CPU on a machine without GPUs. "gpu": each rank's GPU, or an error."""

    @property
    def folder(self) -> Path:
        """Return the path of the run folder."""
        return Path(self.output_folder) / self.name


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    pretrained: Annotated[str, PER_NODE] = ""
    """A model that gives dimensions, initial weights, tokenizer and chat template: a folder in Hugging Face's format, a run
    folder or a checkpoint, or the name of a model on the Hugging Face Hub, such as Qwen/Qwen3-0.6B. Settings that are given
    beside it take precedence. `--from X` is short for `--model.pretrained X`, which also precedes the
    settings of the TOML file."""
    revision: Annotated[str, Constraint(only_with="[model] pretrained")] = ""
    """Commit, branch or tag of the model on the Hub. Empty: main. A run records the commit, with which it also resumes."""
    huggingface: Annotated[str, PER_NODE] = ""
    """Path of a folder in Hugging Face's format, of its config.json, or of a checkpoint, which gives the family and the
    dimensions of the model instead of `name` and `size`. It loads no weights; `pretrained` does."""
    name: Annotated[str, FIXED, NAMED_MODEL] = "llama3"
    """Name of the model family, such as qwen3 (docs/models.md)."""
    size: Annotated[str, FIXED, NAMED_MODEL] = "debug"
    """Name of one of the family's model sizes."""
    overrides: Annotated[Mapping[str, int | float | bool | str | tuple[int | float | bool | str, ...]], FIXED] = field(
        default_factory=dict
    )
    """Dimensions that replace those of the named size: `overrides = { n_layers = 4 }` or `--model.overrides.n_layers 4`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    backend: Literal["default", "tiktoken", "sentencepiece", "huggingface", "tekken"] = "default"
    """Type of tokenizer. "default": the small tokenizer in this repository; "tiktoken": a tiktoken file such as Llama 3's;
    "sentencepiece": a Llama 2 model file; "huggingface": a tokenizer.json, read by the package `tokenizers`; "tekken": a
    tekken.json of Mistral."""
    pattern: Annotated[str, Constraint(only_with="[tokenizer] backend = tiktoken")] = ""
    """Pattern that splits text before bytes are merged, as in the training of the file: "llama3", "llama4", "qwen2", "gpt2",
    "cl100k", "o200k", or a regular expression. Empty: "llama3". A file with as many tokens as that of another known model is then
    an error; any other file gets a warning, except Llama 3's and the default one."""
    reuse_reserved_tokens: Annotated[
        Mapping[str, str],
        FIXED,
        Constraint(free_keys=True, only_with="[tokenizer] backend = default or tiktoken or tekken"),
    ] = field(default_factory=dict)
    """New names for reserved tokens (their ids do not change): { "<|im_start|>" = "<|reserved_special_token_0|>" }."""
    extra_special_tokens: Annotated[tuple[str, ...], FIXED] = ()
    """Special tokens to add after the end of the vocabulary. The model's vocab_size must be large enough for them."""
    path: Annotated[str, PER_NODE, Constraint(only_with="[tokenizer] backend != default")] = ""
    """Path of the tokenizer's file. With backend = "huggingface", it may also be the folder that contains tokenizer.json."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    init_timeout_s: Seconds = 600.0
    """Maximum time that ranks wait for each other at startup."""
    timeout_s: Seconds = 600.0
    """Maximum time that a collective waits for a rank before the job fails."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dataset: Annotated[
        Literal[
            "python_stdlib",
            "text",
            "jsonl",
            "parquet",
            "csv",
            "huggingface",
            "tokens",
            "chat",
            "preference",
            "prepared",
        ],
        Constraint(only_with="empty [data] datasets"),
    ] = "python_stdlib"
    """Type of dataset: the source code of Python's standard library, text files, texts in JSON, Parquet or CSV files or in a
    Hugging Face dataset, token files, conversations or preference pairs in any of these formats, or prepared token stores."""
    path: Annotated[
        str, PER_NODE, Constraint(only_with="empty [data] datasets and [data] dataset != python_stdlib")
    ] = ""
    """A file, a folder, a glob pattern, a file that lists such paths (NAME.manifest), or the name of a Hugging Face dataset."""
    datasets: Annotated[Mapping[str, str], PER_NODE] = field(default_factory=dict)
    """Named datasets that replace `dataset` and `path`: datasets = { web = "jsonl:/data/*.jsonl", code = "text:/data/code" }."""
    mixture: Annotated[tuple[str, ...], Constraint(only_with="[data] datasets")] = ()
    """Dataset weights. Each entry applies from its sample index on: ["0: web=0.7 code=0.3", "1000000: web=0.2 code=0.8"].
    Empty: all datasets have equal weights. When a run resumes, entries that it has not reached yet may be changed."""
    text_field: Annotated[str, Constraint(only_with="a jsonl, parquet, csv or huggingface dataset")] = "text"
    """Name of the JSON field or table column that contains the document."""
    columns: Annotated[Mapping[str, str], Constraint(only_with="a chat or preference dataset")] = field(
        default_factory=dict
    )
    """Names of fields in the data: columns = { question = "query", answer = "reply" } reads the field query as question. They may
    be fields of documents (messages, conversations, prompt, completion, instruction, input, output, question, answer, chosen,
    rejected, system, tools) or of messages (role, content)."""
    subset: Annotated[str, Constraint(only_with="a huggingface, chat or preference dataset")] = ""
    """Name of the configuration to use, if a Hugging Face dataset has several."""
    split: Annotated[str, Constraint(only_with="a huggingface, chat or preference dataset")] = "train"
    """Name of the split to use, if a Hugging Face dataset has several."""
    token_dtype: Annotated[Literal["uint16", "uint32"], Constraint(only_with="a tokens dataset")] = "uint16"
    """Integer type of the tokens in a .bin file that has no .idx file."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """Action for an unreadable document. "skip": drop it and record it in the store; "stop": fail on the first such document."""
    max_bad_documents: Annotated[
        int, Constraint(min=0, max=10**15, unit="documents", used_with="[data] on_bad_document = skip")
    ] = 1000
    """Maximum number of unreadable documents that preparation skips. If there are more, preparation fails."""
    max_bad_documents_percent: Annotated[
        float, Constraint(min=0, max=100, unit="percent", used_with="[data] on_bad_document = skip")
    ] = 1.0
    """Maximum share of unreadable documents among all documents of a dataset, and of damaged files among its files. If a
    dataset exceeds this share, preparation fails."""
    max_document_bytes: Annotated[int, Constraint(min=1, max=2**31, unit="bytes")] = 2**25
    """Maximum length of a readable document. Each process that prepares data needs memory for a few documents of this length."""
    held_out_fraction: Annotated[float, Constraint(min=0, max=0.5)] = 0.01
    """Fraction of documents to hold out for evaluation. They are selected by a hash of their content. If the hash selects none or
    all of a few documents, this share of the tokens, the last ones, is held out instead. With dataset = "prepared", the store
    keeps the fraction with which it was prepared."""
    chat_template: Annotated[str, Constraint(only_with="a chat or preference dataset")] = "llama3"
    """Format of conversations: a shipped template, such as "llama3" (docs/chat.md), or a path (.jinja file or model folder)."""
    allowed_special: Annotated[tuple[str, ...], Constraint(only_with="a chat or preference dataset")] = ()
    """Special tokens that are recognized inside message text. Other special tokens are plain text there."""
    ignored_fields: Annotated[tuple[str, ...], Constraint(only_with="a chat or preference dataset")] = ()
    """Names of fields that are removed from documents and messages. Any other field that neither the format nor the template uses
    makes a document bad if it may change what is trained on; otherwise it is ignored, and counted in the summary."""
    packing: Annotated[Literal["wrapped", "best-fit", "none"], FIXED] = "wrapped"
    """Assignment of documents to samples. "wrapped": concatenate all documents and split the result every seq_len tokens.
    "best-fit": fill samples with complete documents. "none": one document per sample. The last two pad samples to seq_len."""
    long_documents: Annotated[
        Literal["split", "truncate", "drop"], FIXED, Constraint(only_with="[data] packing = best-fit or none")
    ] = "split"
    """Action for a document longer than a sample. "split": divide it; "truncate": keep its beginning; "drop": skip it."""
    document_mask: Annotated[bool, FIXED] = False
    """Whether attention is restricted to tokens of the same document. If so, positions restart at 0 in each document."""
    shuffle: Annotated[bool, FIXED] = True
    """Whether to shuffle the samples in each epoch. The order depends on seed and epoch. false: samples keep the store order."""
    num_workers: Annotated[CountOrZero, PER_NODE] = 0
    """Number of processes per rank that load samples in the background; 0: the training process loads the samples."""
    prefetch: Annotated[Count, Constraint(used_with="[data] num_workers > 0")] = 2
    """Number of microbatches that each worker loads ahead."""
    store_folder: Annotated[str, PER_NODE] = "outputs/token_stores"
    """Path of the folder for prepared token stores. Each store is identified by a hash of its dataset and tokenizer."""
    prepare_workers: Annotated[CountOrZero, PER_NODE] = 0
    """Number of processes that tokenize documents; 0: one process per core."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    steps: Steps = 1000
    """Number of optimizer steps of the run."""
    epochs: Annotated[float | None, Constraint(exclusive_min=0, max=10**6, unit="epochs")] = None
    """Length of the run in epochs instead of in steps; one epoch has as many samples as all training datasets together. The run
    ends with the step that completes the last epoch. "none": `steps` is the length. On the command line, either of the two
    replaces the other in the file."""
    seq_len: Annotated[int, Constraint(min=1, max=10**8, unit="tokens", fixed_on_resume=True)] = 2048
    """Number of tokens in a sample."""
    global_batch_size: Samples = 16
    """Number of samples in one optimizer step, over all ranks and microbatches."""
    local_batch_size: Samples = 1
    """Number of samples in one microbatch on one data-parallel rank. Several microbatches make up the global batch."""
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of forward and backward."""
    parameter_dtype: Annotated[Literal["fp32", "bf16"], FIXED] = "fp32"
    """Precision of the parameters between steps. bf16 needs half as much memory as fp32, but rounding loses small updates unless
    [optimizer] offload keeps an fp32 copy."""
    max_norm: Annotated[float | None, Constraint(exclusive_min=0)] = 1.0
    """Maximum global gradient norm. Gradients with a larger norm are scaled down to this norm. "none": no clipping."""
    reduce_every_microbatch: bool = False
    """Whether to reduce gradients after each microbatch instead of once per step. This saves memory but adds communication."""
    loss_chunk_tokens: Annotated[int, Constraint(min=1, max=10**8, unit="tokens")] = 1024
    """Maximum number of tokens whose logits are held in memory at once."""
    cpu_threads: Annotated[CountOrZero, PER_NODE] = 0
    """Number of threads per rank for CPU operators, at most the node's cores; 0: `OMP_NUM_THREADS` if it is set, otherwise the
    cores divided by the node's ranks."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Annotated[Literal["adamw"], FIXED] = "adamw"
    """Name of the optimizer."""
    lr: Annotated[float, Constraint(exclusive_min=0)] = 3e-4
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Constraint(min=0, max=0.999999)] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Annotated[float, Constraint(exclusive_min=0)] = 1e-8
    """Term added to the denominator of the update."""
    weight_decay: Annotated[float, Constraint(min=0)] = 0.1
    """Decoupled weight decay of matrices. Norms and biases are not decayed."""
    state_dtype: Annotated[Literal["fp32", "bf16", "8bit"], FIXED] = "fp32"
    """Precision of the moments. Updates are computed in fp32. bf16 halves the memory, but for betas above about 0.99 small
    changes are lost to rounding. 8bit quarters the memory of matrices whose row length is a multiple of 256."""
    offload: Literal["none", "state", "state_and_gradients"] = "none"
    """Tensors to keep in host memory; the CPU then computes the update. "state": the moments and an fp32 copy of the parameters.
    Gradients are copied when the update starts. "state_and_gradients": the same, but gradients are copied during backward."""
    in_backward: bool = False
    """Whether to update each parameter during backward, as soon as its gradient is reduced, and then free the gradient.
    Incompatible with clipping and with skipping steps, because both need the global gradient norm before any update."""

    @property
    def frees_gradients(self) -> bool:
        """Whether each gradient is used and freed during backward, as soon as it is reduced."""
        return self.in_backward or self.offload == "state_and_gradients"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: Annotated[int | None, Constraint(min=1, max=2**16, fixed_on_resume=True)] = None
    """Rank of the adapters: the product of two matrices of this rank is added to each target, and only these matrices are trained
    (Hu et al. 2021, arXiv:2106.09685). [checkpoint] init_from names the base model. "none": train all parameters."""
    alpha: Annotated[float, ADAPTED, Constraint(exclusive_min=0, max=10**6, fixed_on_resume=True)] = 32.0
    """Numerator of the scale alpha / rank, by which each product is multiplied. If alpha is constant, the best learning rate
    depends little on the rank."""
    rslora: Annotated[bool, ADAPTED, FIXED] = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732)."""
    dropout: Annotated[float, ADAPTED, Constraint(min=0, max=0.9)] = 0.0
    """Probability with which a value of an adapter's input is set to zero in training. The values depend on the seed, not on the
    layout."""
    targets: Annotated[tuple[str, ...], ADAPTED, FIXED] = ("*",)
    """Names of linear modules of the blocks, or patterns: "*.attention.w[qv]", "layers.3.*". "*": all of them."""
    train_fully: Annotated[tuple[str, ...], ADAPTED, FIXED] = ()
    """Names or patterns of modules whose own parameters are trained in addition to the adapters: "tok_embeddings", "*norm"."""
    init: Annotated[Literal["kaiming", "gaussian"], ADAPTED] = "kaiming"
    """Initial values of the first matrix: "kaiming": uniform up to 1 / sqrt(inputs); "gaussian": normal, with standard deviation
    1 / rank. The second matrix starts at zero."""
    init_from: Annotated[str, ADAPTED] = ""
    """Path of an adapter to continue with: a run folder (or RUN_FOLDER@best), a checkpoint, or a folder of the package peft."""
    dtype: Annotated[Literal["fp32", "bf16"], ADAPTED, FIXED] = "fp32"
    """Precision of the trained parameters between steps. Frozen parameters have [training] parameter_dtype."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    loss: Annotated[Literal["none", "dpo", "ipo", "simpo", "orpo"], FIXED] = "none"
    """Loss on pairs of a chosen and a rejected answer. "none": train on every target token. "dpo" and "ipo" compare the model
    with its initial weights, and compute the log-probabilities of all answers before the first step."""
    beta: Annotated[float, PREFERRED, Constraint(exclusive_min=0, max=1000, fixed_on_resume=True)] = 0.1
    """Factor of the implicit rewards in "dpo" and "simpo", regularization strength in "ipo", weight of the odds ratio in "orpo".
    Usual values: 0.1 for all losses except "simpo", which needs about 2."""
    margin: Annotated[
        float, Constraint(min=0, max=1000, fixed_on_resume=True, only_with="[preference] loss = simpo")
    ] = 0.5
    """Target difference between the rewards of the chosen and of the rejected answer (gamma in the paper)."""

    @property
    def enabled(self) -> bool:
        return self.loss != "none"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with its initial weights."""
        return self.loss in ("dpo", "ipo")


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    name: Literal["cosine", "linear", "warmup_stable_decay", "constant", "range_test"] = "cosine"
    """Shape of the learning rate's decay after warm-up. "constant": no decay. "range_test": the rate rises exponentially in all
    steps, from min_lr_ratio times the peak to the peak (scripts/find_lr.py)."""
    warmup_steps: StepsOrZero = 0
    """Number of steps of linear warm-up to the peak learning rate."""
    decay_steps: Annotated[StepsOrZero, Constraint(only_with="[lr_schedule] name = warmup_stable_decay")] = 0
    """Number of steps of the final decay of "warmup_stable_decay". "cosine" and "linear" decay over all steps after warm-up."""
    min_lr_ratio: Annotated[Fraction, Constraint(used_with="[lr_schedule] name != constant")] = 0.1
    """Final learning rate (of "range_test": the first one), as a fraction of the peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    dp_replicate: Degree = 1
    """Number of replicas of the model. Each replica shards all parameters over its own ranks (hybrid sharding)."""
    dp_shard: Annotated[int, Constraint(min=-1, max=10**6, unit="ranks")] = -1
    """Number of ranks over which parameters are sharded; -1: all ranks that the other degrees do not use."""
    cp: Degree = 1
    """Number of ranks over which each sequence is split (context parallelism)."""
    tp: Degree = 1
    """Number of ranks over which each matrix is sharded (tensor parallelism)."""
    pp: Degree = 1
    """Number of groups of ranks over which the layers are partitioned (pipeline parallelism)."""
    ep: Degree = 1
    """Number of ranks over which the experts of a layer are partitioned (expert parallelism). It is no factor of the number of
    ranks, but a divisor of dp_shard x cp x tp: these ranks share the experts, which tensor parallelism does not split."""
    sequence_parallel: Annotated[bool, Constraint(used_with="[parallel] tp > 1")] = True
    """Whether tensor-parallel ranks split the residual stream along the sequence; false: each rank holds the complete stream."""
    async_tensor_parallel: bool = False
    """Whether to overlap tensor-parallel communication with adjacent matrix products. Requires GPUs and [compile] enabled."""
    pipeline_schedule: Annotated[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        PIPELINE,
    ] = "1F1B"
    """Order in which a pipeline executes the forward and backward passes of the microbatches."""
    pipeline_stages_per_rank: Annotated[CountOrZero, PIPELINE] = 0
    """Number of pipeline stages per rank; 0: as many as the schedule needs (1 for GPipe and 1F1B, otherwise 2)."""
    pipeline_split_points: Annotated[tuple[str, ...], PIPELINE] = ()
    """Name of the first block of each stage except stage 0, such as layers.3. Empty: balance parameters between stages."""
    reshard_after_forward: Literal["default", "always", "never"] | int = "default"
    """Whether to free gathered parameters after forward. "default": those of every FSDP unit except the output unit, or none with
    pp > 1. An integer: after forward, keep the parameters sharded over groups of this number of ranks."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which FSDP sums the gradients of microbatches and of ranks. "bf16" halves the traffic, but rounds every sum.
    It does not affect a single data-parallel rank, which needs no FSDP."""
    fsdp_prefetch: CountOrZero = 0
    """Number of FSDP units to gather in advance, in forward and backward. 0: FSDP's default, which is 1 unit in backward."""
    cpu_offload: bool = False
    """Whether to keep parameters, gradients and optimizer state in host memory and update them there. Parameter shards are copied
    to the device for each use."""
    fsdp_units: Literal["separate", "root"] = "separate"
    """FSDP units of embedding and output. "separate": one each. "root": the root unit, by default gathered for the full step."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    balance_loss: Annotated[float, Constraint(min=0, max=1e6)] = 0.0
    """Coefficient of the balance loss, which is 1 for each layer if all experts get equally many tokens (arXiv:2101.03961). It is
    computed for each layer and sample, averaged over the samples of a step, and summed over the layers. 0: no balance loss."""
    z_loss: Annotated[float, Constraint(min=0, max=1e6)] = 0.0
    """Coefficient of the routers' z-loss, the mean squared logsumexp of a token's logits (arXiv:2202.08906); averaged over
    samples and summed over layers like the balance loss. 0: no z-loss."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    mode: Literal["none", "full", "selective", "budget"] = "none"
    """Activations that blocks recompute in backward. "none": no activations; "full": all activations; "selective": all except the
    results of operators in `save`; "budget": activations that the compiler selects to meet memory_budget."""
    save: Annotated[tuple[Saveable, ...], SELECTIVE] = ("matmuls", "attention", "reduce_scatters", "exchanges")
    """Operators whose results are saved for backward instead of being recomputed. "exchanges": of rows between experts' ranks."""
    save_every_nth_matmul: Annotated[Count, SELECTIVE] = 1
    """Interval n: if `save` contains "matmuls", the result of only every n-th matmul of a block is saved."""
    every_n_blocks: Annotated[Count, Constraint(used_with="[activation_checkpoint] mode = full or selective")] = 1
    """Interval n: the mode applies to every n-th block, starting with the first block."""
    offload_inputs: Annotated[bool, Constraint(only_with="[activation_checkpoint] mode = full")] = False
    """Whether the saved inputs of blocks are kept in host memory between forward and backward."""
    recompute_all_gather: bool = True
    """Whether to repeat the all-gathers of tp (inputs of column-wise matmuls) and cp (keys and values) in backward; false: save
    the gathered tensors for backward. The setting affects no other operator."""
    memory_budget: Annotated[Fraction, Constraint(used_with="[activation_checkpoint] mode = budget")] = 0.5
    """Maximum activation memory, as a fraction of the activation memory with mode = "none"."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    enabled: Literal["auto"] | bool = "auto"
    """Whether to compile each block and, without tensor parallelism, the loss (torch.compile). "auto": on GPUs, if the node has
    a C compiler and Python's headers, and the pipeline schedule allows it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    enabled: bool = True
    """Whether to save checkpoints. false: a stopped run is lost, which suits measurements and trials."""
    interval_steps: Annotated[StepsOrZero, SAVING] = 500
    """Number of steps between checkpoints; 0: save only after the last step. The last step is always saved."""
    async_mode: Annotated[Literal["off", "thread", "process"], SAVING] = "off"
    """Method of writing checkpoints. "off": training waits until a checkpoint is written. "thread", "process": training waits
    only for a copy to host memory. A thread or a separate process (Linux only) then writes this copy in the background."""
    keep: Annotated[int, Constraint(min=0, max=10**9, unit="checkpoints", used_with="[checkpoint] enabled")] = 0
    """Number of the latest complete checkpoints to keep. Each save deletes older checkpoints. 0: keep all checkpoints."""
    keep_interval_steps: Annotated[StepsOrZero, Constraint(used_with="[checkpoint] keep > 0")] = 0
    """Checkpoints whose step is a multiple of this number are kept in addition to the `keep` latest ones. 0: keep no others."""
    on_failure: Annotated[Literal["continue", "stop"], SAVING] = "continue"
    """Action after a failed save (for example, on a full disk). "continue": log a warning and save again at the next interval;
    "stop": end the run. In both cases, the last save of a run must succeed."""
    load_step: Annotated[
        int | Literal["best"], Constraint(min=0, max=10**12, unit="steps", only_with="[checkpoint] enabled")
    ] = 0
    """Step to roll back to, or "best": that of the best checkpoint. The first start with this value moves the run's newer
    checkpoints to discarded-N/. 0: resume from the latest checkpoint."""
    init_from: str = ""
    """Path of a new run's initial weights: a run folder (its newest checkpoint; with @best at the end of the path, its best one),
    checkpoint or Hugging Face model folder. Empty: random weights."""
    resize_embeddings: Annotated[bool, INITIALIZED] = False
    """Whether to accept weights with a smaller vocabulary. New embedding and output rows become the mean of the loaded rows."""
    init_exclude: Annotated[tuple[str, ...], INITIALIZED] = ()
    """Names of parameters that are initialized randomly, not loaded from init_from. Examples: output.weight, layers.7.*."""
    export_huggingface: Annotated[bool, Constraint(only_with="[checkpoint] enabled")] = False
    """Whether to also write the model to the run folder in Hugging Face format after the last step; with [lora] rank, only the
    adapter, in the format of the package peft."""
    export_checkpoint: Annotated[Literal["last", "best"], Constraint(only_with="[checkpoint] export_huggingface")] = (
        "last"
    )
    """Checkpoint that export_huggingface writes: that of the last step, or the best one by [evaluation] keep_best_on."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    interval_steps: StepsOrZero = 0
    """Number of steps between evaluations on held-out documents. An evaluation also follows the last step. 0: never evaluate."""
    max_samples: Annotated[int, Constraint(min=0, max=10**9, unit="samples")] = 0
    """Maximum number of samples per dataset in one evaluation; 0: all samples."""
    datasets: Annotated[Mapping[str, str], PER_NODE] = field(default_factory=dict)
    """Datasets used for evaluation only, in addition to held-out documents: datasets = { wiki = "jsonl:/data/wiki.jsonl" }."""
    keep_best_on: Annotated[
        str, Constraint(only_with="[checkpoint] enabled", used_with="[evaluation] interval_steps")
    ] = ""
    """Name of an evaluation dataset. The checkpoint with the lowest loss on this dataset is always kept. It is the run's best
    checkpoint, which commands and settings find as RUN_FOLDER@best."""
    early_stopping_patience: Annotated[
        int,
        Constraint(
            min=0,
            max=10**6,
            unit="evaluations",
            only_with="[evaluation] keep_best_on and [evaluation] interval_steps",
        ),
    ] = 0
    """Number of evaluations in a row in which the loss on keep_best_on does not fall, after which the run ends, with a checkpoint
    and as after its last step. 0: never."""
    early_stopping_min_delta: Annotated[
        float, Constraint(min=0, max=1000, only_with="[evaluation] early_stopping_patience")
    ] = 0.0
    """Decrease below the lowest loss so far that a falling loss must exceed."""


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    prompts: Annotated[tuple[str, ...], Constraint(multiline=True)] = ()
    """Texts that the model continues during training, to show what it has learned: ["def ", "import "]. If the run trains on
    conversations, each is a user's message. Each new token costs one forward over a microbatch. Empty: no samples."""
    interval_steps: Annotated[StepsOrZero, PROMPTED] = 0
    """Number of steps between samples. Samples also follow the last step. 0: only these."""
    max_new_tokens: Annotated[int, PROMPTED, Constraint(min=1, max=10**6, unit="tokens")] = 64
    """Maximum number of tokens of a text. Prompt and text have at most [training] seq_len tokens together."""
    temperature: Annotated[float, PROMPTED, Constraint(min=0, max=1000)] = 0.8
    """Divisor of the logits. 0: always the most likely token."""
    top_k: Annotated[int, PROMPTED, Constraint(min=0, max=10**9)] = 0
    """Number of most likely tokens from which the next one is sampled; 0: all."""
    top_p: Annotated[float, PROMPTED, Constraint(exclusive_min=0, max=1)] = 1.0
    """Total probability of the most likely tokens from which the next one is sampled."""
    seed: Annotated[int, PROMPTED, Constraint(min=0, max=2**63 - 1)] = 0
    """Seed of the sampling, the same for each prompt and each time."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    interval_steps: Steps = 10
    """Number of steps between metrics records. The first and the last step are always recorded."""
    sinks: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"], ...] = (
        "console",
        "jsonl",
        "tensorboard",
    )
    """Where the records go: lines of the console, metrics.jsonl and TensorBoard's files in the run folder, and the services
    Weights & Biases, MLflow and Trackio. All but "console" require "jsonl", because they deliver its records."""
    project: Annotated[str, SENT] = "meshwright"
    """Name of the project in W&B and Trackio, and of the experiment in MLflow."""
    run_name: Annotated[str, SENT] = ""
    """Name of the run in a service. Empty: [run] name."""
    tags: Annotated[tuple[str, ...], SENT] = ()
    """Tags of the run in a service."""
    notes: Annotated[str, SENT] = ""
    """Text that describes the run in a service."""
    entity: Annotated[str, Constraint(only_with="[metrics] sinks = wandb")] = ""
    """User or team of W&B. Empty: the default of the account."""
    mlflow_tracking_uri: Annotated[str, Constraint(only_with="[metrics] sinks = mlflow")] = ""
    """Address of the MLflow server, or of a database: sqlite:///mlflow.db. Empty: MLFLOW_TRACKING_URI, or MLflow's default."""


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    first_step: StepsOrZero = 0
    """First step to trace with torch's profiler; 0: trace no step. The traces are written to profiles/ in the run folder."""
    num_steps: Annotated[int, Constraint(min=1, max=100, unit="steps"), PROFILED] = 1
    """Number of consecutive steps in a trace. A trace of a large model has about 10 MB per step."""
    rank: Annotated[Literal["all"] | int, Constraint(min=0, only_with="[profiling] first_step")] = 0
    """Rank to trace, or "all"."""
    memory_snapshot: Annotated[bool, PROFILED] = False
    """Whether to also record all allocations of GPU memory in these steps, with their stacks."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    max_consecutive_skips: Count = 8
    """Number of consecutive skipped steps after which on_max_skips applies. A step may be skipped because of a
    spike, or because of a non-finite loss or gradient norm."""
    on_max_skips: Annotated[Literal["stop", "rollback"], Constraint(only_with="[checkpoint] enabled")] = "stop"
    """Action after max_consecutive_skips. "stop": end the run; "rollback": resume from the latest checkpoint without
    the samples of the skipped steps."""
    max_rollbacks: Count = 3
    """Maximum number of rollbacks. The run stops if it needs another rollback."""
    on_loss_spike: Literal["off", "skip", "rollback"] = "off"
    """Action after a spike, which is a loss or gradient norm far above those of the last 128 steps. "skip": skip the step;
    "rollback": resume from the latest checkpoint and skip the samples of the step."""
    spike_threshold_sigma: Annotated[
        float, Constraint(exclusive_min=0, max=10**6, used_with="[resilience] on_loss_spike = skip or rollback")
    ] = 6.0
    """A loss or gradient norm is a spike if it exceeds the mean by more than this number of standard deviations."""
    straggler_ratio: Annotated[float | None, Constraint(exclusive_min=1)] = 1.5
    """Slowdown factor above which a rank is reported as a straggler. A rank is slow if its forward time of a block exceeds the
    median rank's by this factor, or if waiting for its data lengthens steps by this factor. "none": never warn."""
    hang_timeout_s: Annotated[float, Constraint(min=0, max=10**7, unit="seconds")] = 300.0
    """Time without a completed step after which the run prints every rank's stack and aborts. The limit is at least 5 times the
    longest step so far. A step that may compile (the first one, and parts of evaluations) has a limit of 12 times this setting,
    at least an hour. During checkpoints, the run aborts only if a rank's heartbeat is missing. 0: never abort. The time must be
    below [distributed] timeout_s."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run. Each field except `origins` is a section of the TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Origin of each setting given in the TOML file or on the command line: {"training.steps": "--training.steps 5"}."""

    @property
    def trained_dtype(self) -> Literal["fp32", "bf16"]:
        """Precision of the trained parameters between steps."""
        return self.training.parameter_dtype if self.lora.rank is None else self.lora.dtype

    def value(self, key: str) -> Any:
        """Return the value of a setting. key: "section.name", or "section.table.entry" for the complete table."""
        section, name = key.split(".")[:2]
        return getattr(getattr(self, section), name)

    def explain(self, error: ConfigError) -> str:
        """Return the error line for the user: the origin of the value, then the broken rule."""
        if not error.key:
            return error.message
        section, _, name = error.key.partition(".")
        default = f"[{section}] {name} = {toml_value(self.value(error.key))} (default)"
        return f"{self.origins.get(error.key, default)}: {error.message}"


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value) -> str:
    """Return a value as TOML. None is written as the string "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    return str(value)
