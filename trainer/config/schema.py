"""Every setting of a run: its type, default, unit, range and meaning.

A setting is one field of one section below. The TOML files, the command line, `--help`, docs/configuration.md and all
checks of single values are made from these declarations (settings.py); rules between settings stand where the
values are used, and raise `ConfigError` too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


class ConfigError(Exception):
    """A setting that cannot be honoured: one clear line for the user, exit code 2.

    key: "section.name" of the setting at fault, or "" where `message` already says everything.
    message: what is wrong, in words. `Config.explain` puts the value and its origin in front.
    """

    def __init__(self, key: str, message: str):
        self.key = key
        self.message = "".join(
            c if c.isprintable() else ascii(c)[1:-1] for c in message
        )  # one line, whatever was typed
        super().__init__(f"{key}: {self.message}" if key else self.message)

    def __reduce__(self) -> tuple:
        return ConfigError, (self.key, self.message)  # worker processes raise it too


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a single value must satisfy. Bounds are inclusive, except `above`."""

    min: float | None = None
    exclusive_min: float | None = None
    max: float | None = None
    unit: str = ""
    fixed_on_resume: bool = False
    """A run that resumes from a checkpoint must have the same value: the saved state means something else without it."""
    per_node: bool = False
    """The machines of one run may differ in it."""
    free_keys: bool = False
    """Of a table: its entries may have any name."""


FIXED = Constraint(fixed_on_resume=True)
LOCAL = Constraint(per_node=True)

Count = Annotated[int, Constraint(min=1, max=4096)]
CountOrZero = Annotated[int, Constraint(min=0, max=4096, per_node=True)]
CountOrDefault = Annotated[int, Constraint(min=0, max=4096)]
Steps = Annotated[int, Constraint(min=1, max=10**12, unit="steps")]
StepsOrZero = Annotated[int, Constraint(min=0, max=10**12, unit="steps")]
Documents = Annotated[int, Constraint(min=0, max=10**15, unit="documents")]
Samples = Annotated[int, Constraint(min=1, max=10**7, unit="samples")]
Seconds = Annotated[float, Constraint(min=1, max=10**7, unit="seconds")]
Degree = Annotated[int, Constraint(min=1, max=10**6, unit="ranks")]
Fraction = Annotated[float, Constraint(min=0, max=1)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = ""
    """Folder of this run inside output_folder; empty: the name of the configuration file."""
    output_folder: str = "outputs"
    """Where the folders of runs are made."""
    seed: Annotated[int, Constraint(min=0, max=2**63 - 1, fixed_on_resume=True)] = 0
    """Seed of the initial weights and of the order of samples."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Bit-identical repetition of a run, at some cost in speed on GPUs; auto: on for CPU, off for GPUs."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPU of each rank where there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: Annotated[str, FIXED] = "llama3"
    """Model family: a key of MODELS in models/__init__.py."""
    size: Annotated[str, FIXED] = "debug"
    """Named size of that family."""
    overrides: Annotated[Mapping[str, int | float | bool], FIXED] = field(default_factory=dict)
    """Single dimensions of the size, replaced: overrides = { n_layers = 4 }, or --model.overrides.n_layers 4."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    backend: Literal["default", "tiktoken", "sentencepiece", "huggingface"] = "default"
    """default: the small shipped one; tiktoken: a Llama-3 rank file; sentencepiece: a Llama-2 model file; huggingface: a
    tokenizer.json, by the package tokenizers."""
    reuse_reserved_tokens: Annotated[Mapping[str, str], Constraint(fixed_on_resume=True, free_keys=True)] = field(
        default_factory=dict
    )
    """New special tokens on the ids of reserved ones: { "<|im_start|>" = "<|reserved_special_token_0|>" }; only with backend =
    default or tiktoken."""
    extra_special_tokens: Annotated[tuple[str, ...], FIXED] = ()
    """New special tokens behind the vocabulary; vocab_size must have room for them."""
    path: Annotated[str, LOCAL] = ""
    """The tokenizer's file, with backend = huggingface also its folder; not with backend = default."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    init_timeout_s: Seconds = 600.0
    """How long ranks wait for each other at the start."""
    timeout_s: Seconds = 600.0
    """How long a collective may wait for a rank before the job fails."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dataset: Literal["python_stdlib", "text", "jsonl", "parquet", "huggingface", "tokens", "chat", "prepared"] = (
        "python_stdlib"
    )
    """Reader of documents: the Python standard library's own source, text files, JSON lines, parquet tables, datasets of
    Hugging Face, files of tokens, conversations as JSON lines, or stores that were prepared before."""
    path: Annotated[str, LOCAL] = ""
    """File, folder, glob or list (NAME.manifest) with the documents, or a Hugging Face dataset's name; not with dataset =
    python_stdlib."""
    datasets: Annotated[Mapping[str, str], LOCAL] = field(default_factory=dict)
    """Several datasets under names of your own, in the place of dataset and path: datasets = { web = "jsonl:/data/web/*.jsonl",
    code = "text:/data/code" }."""
    mixture: tuple[str, ...] = ()
    """Shares of the datasets, from which sample on: ["0: web=0.7 code=0.3", "1000000: web=0.2 code=0.8"]; empty: equal ones. A
    stage that has not begun may be changed when the run goes on."""
    text_field: str = "text"
    """Field of a JSON line, or column of a table, that holds the document; only with dataset = jsonl, parquet or huggingface."""
    subset: str = ""
    """Configuration of a Hugging Face dataset that has several; only with dataset = huggingface."""
    split: str = "train"
    """Split of a Hugging Face dataset that has several; only with dataset = huggingface."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """What a .bin without .idx holds; only with dataset = tokens."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """What a document that cannot be read does. skip: it is left out, counted and listed in the store; stop: none may be."""
    max_bad_documents: Documents = 1000
    """Documents left out beyond which preparing stops; only with on_bad_document = skip."""
    max_document_bytes: Annotated[int, Constraint(min=1, max=2**31, unit="bytes")] = 2**25
    """A longer document is a problem: each process that prepares holds a few times as much."""
    held_out_fraction: Annotated[float, Constraint(min=0, max=0.5)] = 0.01
    """Share of the documents kept out of training for evaluation; chosen by their content. Stores that were
    prepared before keep theirs."""
    chat_template: str = "llama3"
    """How conversations are written: llama2, llama3, chatml, a .jinja file, or a tokenizer_config.json of Hugging Face's (or its
    folder); only with conversations."""
    allowed_special: tuple[str, ...] = ()
    """Special tokens whose names mean them in messages too; only with conversations."""
    packing: Annotated[Literal["wrapped", "best-fit", "none"], FIXED] = "wrapped"
    """Documents to samples. wrapped: in a row, cut at every seq_len; best-fit: as many whole ones as fit; none: one each. What is
    left is padding."""
    long_documents: Annotated[Literal["split", "truncate", "drop"], FIXED] = "split"
    """What becomes of documents longer than a sample: several samples, their beginning, or nothing; not with packing =
    wrapped."""
    document_mask: Annotated[bool, FIXED] = False
    """Attention ends at the borders of the documents in a sample, and their positions start at 0."""
    shuffle: Annotated[bool, FIXED] = True
    """Visit the samples of each epoch in an order keyed by (seed, epoch); off: in the order of the store."""
    num_workers: CountOrZero = 0
    """Processes that load samples ahead; 0: the training process loads them itself."""
    prefetch: Count = 2
    """Microbatches each worker keeps ready; only with num_workers > 0."""
    store_folder: Annotated[str, LOCAL] = "outputs/token_stores"
    """Where tokenized datasets are kept; found again by content and tokenizer."""
    prepare_workers: CountOrZero = 0
    """Processes that tokenize; 0: one for each core."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    steps: Steps = 1000
    """Optimizer steps of the whole run."""
    seq_len: Annotated[int, Constraint(min=1, max=10**8, unit="tokens", fixed_on_resume=True)] = 2048
    """Length of a sample."""
    global_batch_size: Samples = 16
    """Samples of one optimizer step, over all ranks and microbatches."""
    local_batch_size: Samples = 1
    """Samples of one microbatch on one data-parallel rank; the rest of the global batch is accumulated."""
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of forward and backward; gradients are reduced in fp32."""
    parameter_dtype: Annotated[Literal["fp32", "bf16"], FIXED] = "fp32"
    """Precision in which parameters are kept between steps. bf16: half the memory, but small updates are lost to rounding, unless
    [optimizer] offload keeps an fp32 copy."""
    max_norm: Annotated[float | None, Constraint(exclusive_min=0)] = 1.0
    """Global gradient norm above which gradients are scaled down to it; none: no clipping."""
    reduce_every_microbatch: bool = False
    """Reduce gradients after each microbatch instead of once a step: less memory, more traffic."""
    loss_chunk_tokens: Annotated[int, Constraint(min=1, max=10**8, unit="tokens")] = 1024
    """Tokens whose logits exist at the same time."""
    cpu_threads: CountOrZero = 0
    """Threads of each rank for operators on the CPU; 0: the cores divided by the ranks of the machine."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Annotated[Literal["adamw"], FIXED] = "adamw"
    """Optimizer."""
    lr: Annotated[float, Constraint(exclusive_min=0)] = 3e-4
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Constraint(min=0, max=0.999999)] = (0.9, 0.95)
    """Decay of the averages of gradient and squared gradient."""
    eps: Annotated[float, Constraint(exclusive_min=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Constraint(min=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    state_dtype: Annotated[Literal["fp32", "bf16", "8bit"], FIXED] = "fp32"
    """Precision of the averages that the optimizer keeps; updates are computed in fp32. bf16: half the memory, rounded to the
    nearest, so averages with betas above 0.99 or so no longer follow small changes. 8bit: a quarter; matrices whose rows are
    multiples of 256, in blocks that have a scale each."""
    offload: Literal["none", "state", "state_and_gradients"] = "none"
    """Keep the optimizer's state, and an fp32 copy of the parameters, in host memory, where the update runs.
    state_and_gradients: gradients go there in backward; else when the update begins."""
    in_backward: bool = False
    """Update each parameter in backward, as soon as its gradient is complete, and free that; needs [training] max_norm = "none"
    and [resilience] max_consecutive_skips = 1: nothing is known of the whole update then, to scale it or to leave it out."""


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    name: Literal["cosine", "linear", "warmup_stable_decay"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: StepsOrZero = 0
    """Steps of linear rise to the peak."""
    decay_steps: StepsOrZero = 0
    """Steps of the final decay; only with name = warmup_stable_decay (the others decay over all that follows warm-up)."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    dp_replicate: Degree = 1
    """Groups of ranks that each hold all parameters (hybrid sharding)."""
    dp_shard: Annotated[int, Constraint(min=-1, max=10**6, unit="ranks")] = -1
    """Ranks the parameters are sharded over; -1 takes every rank that the other degrees leave."""
    cp: Degree = 1
    """Ranks that cut each sequence between them (context parallelism)."""
    tp: Degree = 1
    """Ranks that cut each matrix between them (tensor parallelism)."""
    pp: Degree = 1
    """Groups of ranks that cut the layers between them (pipeline parallelism)."""
    sequence_parallel: bool = True
    """With tp: norms and residual stream are cut along the sequence too; off: every tensor-parallel rank holds them whole."""
    async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the products next to it; GPUs with [compile] only."""
    pipeline_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order in which a pipeline works through the microbatches; only with pp > 1."""
    pipeline_stages_per_rank: CountOrDefault = 0
    """Stages that each rank holds; 0: what the schedule needs (1 for GPipe and 1F1B, else 2); only with pp > 1."""
    pipeline_split_points: tuple[str, ...] = ()
    """Blocks that begin the second stage, the third, ..., as layers.3; empty: by number of parameters; only with pp > 1."""
    reshard_after_forward: Literal["default", "always", "never"] | int = "default"
    """Free gathered parameters after forward; default: all but the output unit, none with pp > 1; a number: reshard to groups
    of that size."""
    fsdp_prefetch: CountOrDefault = 0
    """Units whose parameters are gathered ahead, forward and backward; 0: as FSDP does by itself (one, in backward)."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer live in host memory, and the update runs there; shards go to the device when used."""
    fsdp_units: Literal["separate", "root"] = "separate"
    """separate: embedding and output are units of their own; root: they stay gathered for the whole step (to compare)."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    mode: Literal["none", "full", "selective", "budget"] = "none"
    """What blocks compute again in backward. none: nothing; full: all; selective: what is not in save; budget: as memory_budget
    says, chosen by the compiler."""
    save: tuple[Literal["matmuls", "attention", "reduce_scatters"], ...] = ("matmuls", "attention", "reduce_scatters")
    """Results that are kept for backward; only with mode = selective."""
    save_every_nth_matmul: Count = 1
    """Of the matmuls of a block, keep every n-th only; only with mode = selective."""
    every_n_blocks: Count = 1
    """Apply the mode to every n-th block, counted from the first; only with mode = full or selective."""
    offload_inputs: bool = False
    """Keep what mode = full keeps, the inputs of blocks, in host memory between forward and backward."""
    recompute_all_gather: bool = True
    """Gather again in backward what tp and cp gather in forward (inputs of the column-wise matmuls; keys and values), and
    compute nothing else again for it; off: keep it gathered."""
    memory_budget: Fraction = 0.5
    """Share of the activation memory of mode = none that may be used; only with mode = budget."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    enabled: bool = False
    """Compile each block with torch.compile."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval_steps: StepsOrZero = 500
    """Steps between checkpoints; the last step is always saved; 0: only the last."""
    async_mode: Literal["off", "thread", "process"] = "off"
    """Who writes a checkpoint. off: training waits; thread, process: training goes on when a copy in host memory is made, and
    a thread or a process of its own writes it (process: Linux only)."""
    keep: Annotated[int, Constraint(min=0, max=10**9, unit="checkpoints")] = 0
    """Newest whole checkpoints that are kept when a new one is written; 0: all."""
    keep_interval_steps: StepsOrZero = 0
    """Of the older ones, keep those whose step is a multiple of this; 0: none; only with keep > 0."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a save that fails (disk full) does to the run. continue: warn, and try again when the next is due; the last save of
    a run must succeed."""
    load_step: StepsOrZero = 0
    """Go back to this step, once: newer checkpoints of the run are moved aside; 0: the newest."""
    init_from: str = ""
    """Where a new run takes its weights from: a run, a checkpoint, or a folder in Hugging Face's format; empty: random ones."""
    resize_embeddings: bool = False
    """Take weights of a smaller vocabulary too: rows that are not there get the mean of those that are; only with init_from."""
    init_exclude: tuple[str, ...] = ()
    """Parameters that stay random nevertheless, as output.weight or layers.7.*; only with init_from."""
    export_huggingface: bool = False
    """When the last step is saved, write the model in Hugging Face's format too, in the run folder."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    interval_steps: StepsOrZero = 0
    """Steps between evaluations on the held-out documents; the last step is then evaluated too; 0: never."""
    max_samples: Annotated[int, Constraint(min=0, max=10**9, unit="samples")] = 0
    """Samples of each set that one evaluation looks at; 0: all."""
    datasets: Annotated[Mapping[str, str], LOCAL] = field(default_factory=dict)
    """Datasets for evaluation alone, beside the held-out documents: datasets = { wiki = "jsonl:/data/wiki.jsonl" }."""
    keep_best_on: str = ""
    """A set; the checkpoint with the lowest loss on it is written and kept, whatever [checkpoint] keep says."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    interval_steps: Steps = 10
    """Steps between records; the first and the last step are always recorded."""
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    max_consecutive_skips: Count = 8
    """Updates in a row that may be left out because loss or gradient norm is no number, or spikes."""
    on_max_skips: Literal["stop", "rollback"] = "stop"
    """What follows then. rollback: go back to the newest checkpoint and pass over the samples of these updates."""
    max_rollbacks: Count = 3
    """Rollbacks after which the run stops."""
    on_loss_spike: Literal["off", "skip", "rollback"] = "off"
    """A loss or gradient norm far above those of the last 128 updates. skip: leave the update out; rollback: go back to the
    newest checkpoint and pass over its samples."""
    spike_threshold_sigma: Annotated[float, Constraint(exclusive_min=0, max=10**6)] = 6.0
    """How far, in standard deviations; only with on_loss_spike = skip or rollback."""
    straggler_ratio: Annotated[float | None, Constraint(exclusive_min=1)] = 1.5
    """Warn of a rank whose blocks take so many times as long as the median rank's, or for whose data the others wait until a
    step takes so many times as long; none: never."""
    hang_timeout_s: Annotated[float, Constraint(min=0, max=10**7, unit="seconds")] = 300.0
    """End the job, with every rank's stack, when no step has ended for so long, nor for five times the longest step so far; the
    first step, evaluations and checkpoints are not timed, but a rank that gives no sign of life in them ends the job too;
    0: never."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. Each attribute is a section of the TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Where a value was set, as the user wrote it: {"training.steps": "--training.steps 5"}. Defaults are not in it."""

    def value(self, key: str) -> Any:
        """key: "section.name", or "section.table.entry" for the whole table."""
        section, name = key.split(".")[:2]
        return getattr(getattr(self, section), name)

    def explain(self, error: ConfigError) -> str:
        """The one line for the user: where the value at fault was set, then the rule."""
        if not error.key:
            return error.message
        origin = self.origins.get(error.key)
        if origin is None:
            section, _, name = error.key.partition(".")
            origin = f"[{section}] {name} = {toml_value(self.value(error.key))} (default)"
        return f"{origin}: {error.message}"


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value) -> str:
    """One value as TOML; None, which TOML has not, as the string that settings accept for it."""
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
