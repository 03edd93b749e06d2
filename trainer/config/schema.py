"""Every setting of a run: type, default, unit, range and meaning.

A setting is one field of one section. TOML files, the command line, `--help`, docs/configuration.md and the checks of single
values follow from these declarations (fields.py). Rules between settings raise `ConfigError` where the values are used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


class ConfigError(Exception):
    """A setting that cannot be honoured: one line for the user, exit code 2.

    key: "section.name" of the setting, or "" if `message` is complete.
    message: the rule that is broken. `Config.explain` prepends the value and its origin.
    """

    def __init__(self, key: str, message: str):
        self.key = key
        self.message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)  # one line for any input
        super().__init__(f"{key}: {self.message}" if key else self.message)

    def __reduce__(self) -> tuple:
        return ConfigError, (self.key, self.message)  # worker processes raise it too


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Restrictions on one setting. `min` and `max` are inclusive."""

    min: float | None = None
    exclusive_min: float | None = None
    max: float | None = None
    unit: str = ""
    fixed_on_resume: bool = False
    """A run that resumes from a checkpoint must have the same value: the saved state depends on it."""
    per_node: bool = False
    """Nodes of one run may have different values."""
    free_keys: bool = False
    """Keys of the table may be any printable text."""
    only_with: str = ""
    """Condition without which any value but the default is an error (load.py lists the forms); "A and B" needs both."""
    used_with: str = ""
    """Condition without which the setting is ignored: details of a feature that is switched off are not an error."""


FIXED = Constraint(fixed_on_resume=True)
PER_NODE = Constraint(per_node=True)
PIPELINE = Constraint(used_with="[parallel] pp > 1")
SELECTIVE = Constraint(used_with="[activation_checkpoint] mode = selective")
INITIALIZED = Constraint(only_with="[checkpoint] init_from")

Count = Annotated[int, Constraint(min=1, max=4096)]
CountOrZero = Annotated[int, Constraint(min=0, max=4096)]
Steps = Annotated[int, Constraint(min=1, max=10**12, unit="steps")]
StepsOrZero = Annotated[int, Constraint(min=0, max=10**12, unit="steps")]
Samples = Annotated[int, Constraint(min=1, max=10**7, unit="samples")]
Seconds = Annotated[float, Constraint(min=1, max=10**7, unit="seconds")]
Degree = Annotated[int, Constraint(min=1, max=10**6, unit="ranks")]
Fraction = Annotated[float, Constraint(min=0, max=1)]
Saveable = Literal["matmuls", "attention", "reduce_scatters"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = ""
    """Folder of this run inside output_folder; empty: the name of the configuration file."""
    output_folder: str = "outputs"
    """Folder that contains the run folders."""
    seed: Annotated[int, Constraint(min=0, max=2**63 - 1, fixed_on_resume=True)] = 0
    """Seed of the initial weights and of the sample order."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Bitwise reproducible results, at some cost in speed on GPUs. auto: on for CPU, off for GPUs."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPU of each rank if there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: Annotated[str, FIXED] = "llama3"
    """Model family: a key of MODELS in models/__init__.py."""
    size: Annotated[str, FIXED] = "debug"
    """Named size of that family."""
    overrides: Annotated[Mapping[str, int | float | bool], FIXED] = field(default_factory=dict)
    """Dimensions that replace those of the size: overrides = { n_layers = 4 }, or --model.overrides.n_layers 4."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    backend: Literal["default", "tiktoken", "sentencepiece", "huggingface"] = "default"
    """default: the small tokenizer in this repository; tiktoken: a Llama 3 rank file; sentencepiece: a Llama 2 model file;
    huggingface: a tokenizer.json, read by the package tokenizers."""
    reuse_reserved_tokens: Annotated[
        Mapping[str, str],
        Constraint(fixed_on_resume=True, free_keys=True, only_with="[tokenizer] backend = default or tiktoken"),
    ] = field(default_factory=dict)
    """Names for reserved token ids: { "<|im_start|>" = "<|reserved_special_token_0|>" }."""
    extra_special_tokens: Annotated[tuple[str, ...], FIXED] = ()
    """New special tokens after the end of the vocabulary; vocab_size must be large enough for them."""
    path: Annotated[str, Constraint(per_node=True, only_with="[tokenizer] backend != default")] = ""
    """The tokenizer's file; with backend = huggingface also its folder."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    init_timeout_s: Seconds = 600.0
    """Time that ranks wait for each other at the start."""
    timeout_s: Seconds = 600.0
    """Time that a collective waits for a rank before the job fails."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dataset: Annotated[
        Literal["python_stdlib", "text", "jsonl", "parquet", "huggingface", "tokens", "chat", "prepared"],
        Constraint(only_with="empty [data] datasets"),
    ] = "python_stdlib"
    """Format of the documents: the source of Python's standard library, text files, JSON lines, Parquet tables, Hugging Face
    datasets, token files, conversations as JSON lines, or prepared token stores."""
    path: Annotated[
        str, Constraint(per_node=True, only_with="empty [data] datasets and [data] dataset != python_stdlib")
    ] = ""
    """File, folder, glob pattern or list (NAME.manifest) of the documents, or the name of a Hugging Face dataset."""
    datasets: Annotated[Mapping[str, str], PER_NODE] = field(default_factory=dict)
    """Several datasets by name, instead of dataset and path: datasets = { web = "jsonl:/data/web/*.jsonl", code =
    "text:/data/code" }."""
    mixture: Annotated[tuple[str, ...], Constraint(only_with="[data] datasets")] = ()
    """Weights of the datasets, each phase from a sample index on: ["0: web=0.7 code=0.3", "1000000: web=0.2 code=0.8"]; empty:
    equal weights. A phase that has not started may be changed when the run resumes."""
    text_field: Annotated[str, Constraint(only_with="a jsonl, parquet or huggingface dataset")] = "text"
    """Field of a JSON line, or column of a table, that contains the document."""
    subset: Annotated[str, Constraint(only_with="a huggingface dataset")] = ""
    """Configuration of a Hugging Face dataset that has several."""
    split: Annotated[str, Constraint(only_with="a huggingface dataset")] = "train"
    """Split of a Hugging Face dataset that has several."""
    token_dtype: Annotated[Literal["uint16", "uint32"], Constraint(only_with="a tokens dataset")] = "uint16"
    """Integer type of a .bin file without .idx."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """Treatment of an unreadable document. skip: drop it and record it in the store; stop: fail on the first one."""
    max_bad_documents: Annotated[
        int, Constraint(min=0, max=10**15, unit="documents", used_with="[data] on_bad_document = skip")
    ] = 1000
    """Skipped documents beyond which preparation stops."""
    max_document_bytes: Annotated[int, Constraint(min=1, max=2**31, unit="bytes")] = 2**25
    """Length beyond which a document is a bad document; each preparing process holds a few documents of this length."""
    held_out_fraction: Annotated[float, Constraint(min=0, max=0.5)] = 0.01
    """Share of the documents held out for evaluation, chosen by a hash of their content. Prepared stores keep their own."""
    chat_template: Annotated[str, Constraint(only_with="a chat dataset")] = "llama3"
    """Format of conversations: llama2, llama3, chatml, a .jinja file, or a Hugging Face tokenizer_config.json (or its
    folder)."""
    allowed_special: Annotated[tuple[str, ...], Constraint(only_with="a chat dataset")] = ()
    """Special tokens that are also recognized inside message text."""
    packing: Annotated[Literal["wrapped", "best-fit", "none"], FIXED] = "wrapped"
    """How documents become samples. wrapped: concatenated and split every seq_len tokens; best-fit: as many whole documents as
    fit; none: one document each. The rest of a sample is padding."""
    long_documents: Annotated[
        Literal["split", "truncate", "drop"],
        Constraint(fixed_on_resume=True, only_with="[data] packing = best-fit or none"),
    ] = "split"
    """Treatment of documents longer than a sample: split into several samples, truncate to one, or drop."""
    document_mask: Annotated[bool, FIXED] = False
    """Attention does not cross document boundaries in a sample, and positions restart at 0 after each."""
    shuffle: Annotated[bool, FIXED] = True
    """Visit the samples of each epoch in an order keyed by (seed, epoch); false: in the order of the store."""
    num_workers: Annotated[CountOrZero, PER_NODE] = 0
    """Processes that load samples ahead; 0: the training process loads them."""
    prefetch: Annotated[Count, Constraint(used_with="[data] num_workers > 0")] = 2
    """Microbatches that each worker loads ahead."""
    store_folder: Annotated[str, PER_NODE] = "outputs/token_stores"
    """Folder of the prepared token stores, which are found by content and tokenizer."""
    prepare_workers: Annotated[CountOrZero, PER_NODE] = 0
    """Processes that tokenize; 0: one per core."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    steps: Steps = 1000
    """Optimizer steps of the run."""
    seq_len: Annotated[int, Constraint(min=1, max=10**8, unit="tokens", fixed_on_resume=True)] = 2048
    """Length of a sample."""
    global_batch_size: Samples = 16
    """Samples of one optimizer step, over all ranks and microbatches."""
    local_batch_size: Samples = 1
    """Samples of one microbatch on one data-parallel rank; the rest of the global batch is accumulated."""
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of forward and backward; gradients are reduced in fp32."""
    parameter_dtype: Annotated[Literal["fp32", "bf16"], FIXED] = "fp32"
    """Precision of the parameters between steps. bf16: half the memory, but rounding loses small updates unless [optimizer]
    offload keeps an fp32 copy."""
    max_norm: Annotated[float | None, Constraint(exclusive_min=0)] = 1.0
    """Global gradient norm to which gradients are clipped; none: no clipping."""
    reduce_every_microbatch: bool = False
    """Reduce gradients after each microbatch instead of once per step: less memory, more traffic."""
    loss_chunk_tokens: Annotated[int, Constraint(min=1, max=10**8, unit="tokens")] = 1024
    """Tokens whose logits exist at the same time."""
    cpu_threads: Annotated[CountOrZero, PER_NODE] = 0
    """Threads per rank for CPU operators; 0: the cores divided by the ranks of the node."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Annotated[Literal["adamw"], FIXED] = "adamw"
    """Optimizer."""
    lr: Annotated[float, Constraint(exclusive_min=0)] = 3e-4
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Constraint(min=0, max=0.999999)] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Constraint(exclusive_min=0)] = 1e-8
    """Added to the denominator of the update."""
    weight_decay: Annotated[float, Constraint(min=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    state_dtype: Annotated[Literal["fp32", "bf16", "8bit"], FIXED] = "fp32"
    """Precision of the moments; updates are computed in fp32. bf16: half the memory, but rounding to nearest loses small
    changes with betas above about 0.99. 8bit: a quarter; matrices whose rows are multiples of 256, with a scale per group."""
    offload: Literal["none", "state", "state_and_gradients"] = "none"
    """Keep the moments and an fp32 copy of the parameters in host memory, where the update runs. state_and_gradients: copy
    gradients to the host during backward instead of at the start of the update."""
    in_backward: bool = False
    """Fuse the update into backward: update each parameter as soon as its gradient is reduced, then free the gradient.
    Incompatible with clipping and with skipping steps, which need the global norm first."""


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    name: Literal["cosine", "linear", "warmup_stable_decay"] = "cosine"
    """Shape of the decay after warm-up."""
    warmup_steps: StepsOrZero = 0
    """Steps of linear warm-up to the peak."""
    decay_steps: Annotated[StepsOrZero, Constraint(only_with="[lr_schedule] name = warmup_stable_decay")] = 0
    """Steps of the final decay; the other schedules decay over all steps after warm-up."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    dp_replicate: Degree = 1
    """Replicas, each of which shards all parameters over its own ranks (hybrid sharding)."""
    dp_shard: Annotated[int, Constraint(min=-1, max=10**6, unit="ranks")] = -1
    """Ranks over which parameters are sharded; -1: all ranks that the other degrees do not use."""
    cp: Degree = 1
    """Ranks over which each sequence is split (context parallelism)."""
    tp: Degree = 1
    """Ranks over which each matrix is sharded (tensor parallelism)."""
    pp: Degree = 1
    """Groups of ranks over which the layers are partitioned (pipeline parallelism)."""
    sequence_parallel: Annotated[bool, Constraint(used_with="[parallel] tp > 1")] = True
    """Split norms and the residual stream along the sequence; false: every tensor-parallel rank holds all of it."""
    async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the adjacent matrix products; GPUs with [compile] only."""
    pipeline_schedule: Annotated[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        PIPELINE,
    ] = "1F1B"
    """Order in which a pipeline executes the microbatches."""
    pipeline_stages_per_rank: Annotated[CountOrZero, PIPELINE] = 0
    """Stages per rank; 0: as many as the schedule needs (1 for GPipe and 1F1B, else 2)."""
    pipeline_split_points: Annotated[tuple[str, ...], PIPELINE] = ()
    """First blocks of the second stage, the third, ..., such as layers.3; empty: balanced by number of parameters."""
    reshard_after_forward: Literal["default", "always", "never"] | int = "default"
    """Free gathered parameters after forward. default: all but the output unit, none with pp > 1; an integer: reshard to groups
    of that size."""
    fsdp_prefetch: CountOrZero = 0
    """Units whose parameters are gathered ahead in forward and backward; 0: FSDP's default (one, in backward)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory and update them there; shards are copied to the device
    when used."""
    fsdp_units: Literal["separate", "root"] = "separate"
    """separate: embedding and output are separate units; root: they stay gathered for the whole step (for comparison)."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    mode: Literal["none", "full", "selective", "budget"] = "none"
    """Activations that blocks recompute in backward. none: nothing; full: everything; selective: all but those in save; budget:
    chosen by the compiler to meet memory_budget."""
    save: Annotated[tuple[Saveable, ...], SELECTIVE] = ("matmuls", "attention", "reduce_scatters")
    """Results that are saved for backward."""
    save_every_nth_matmul: Annotated[Count, SELECTIVE] = 1
    """Save every n-th matmul of a block only."""
    every_n_blocks: Annotated[Count, Constraint(used_with="[activation_checkpoint] mode = full or selective")] = 1
    """Apply the mode to every n-th block, starting with the first."""
    offload_inputs: bool = False
    """Keep the inputs of blocks, which mode = full saves, in host memory between forward and backward."""
    recompute_all_gather: bool = True
    """Re-gather in backward the tensors that tp and cp gather in forward (inputs of column-wise matmuls; keys and values),
    without recomputing anything else; false: save the gathered tensors."""
    memory_budget: Annotated[Fraction, Constraint(used_with="[activation_checkpoint] mode = budget")] = 0.5
    """Share of the activation memory of mode = none."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    enabled: bool = False
    """Compile each block with torch.compile."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval_steps: StepsOrZero = 500
    """Steps between checkpoints; 0: only the last step, which is always saved."""
    async_mode: Literal["off", "thread", "process"] = "off"
    """Writer of a checkpoint. off: training waits; thread, process: training continues after a copy to host memory, and a
    thread or a separate process writes it in the background (process: Linux only)."""
    keep: Annotated[int, Constraint(min=0, max=10**9, unit="checkpoints")] = 0
    """Latest complete checkpoints that are kept when a new one is written; 0: all."""
    keep_interval_steps: Annotated[StepsOrZero, Constraint(used_with="[checkpoint] keep > 0")] = 0
    """Keep older checkpoints too if their step is a multiple of this; 0: none."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Action after a failed save (such as a full disk). continue: warn, and save again at the next interval; the last save of a
    run must succeed."""
    load_step: StepsOrZero = 0
    """Roll back to this step, once: newer checkpoints of the run are moved to discarded-N/; 0: the latest."""
    init_from: str = ""
    """Source of a new run's weights: a run, a checkpoint, or a Hugging Face model folder; empty: random initialization."""
    resize_embeddings: Annotated[bool, INITIALIZED] = False
    """Accept weights of a smaller vocabulary: missing rows are initialized with the mean of the existing ones."""
    init_exclude: Annotated[tuple[str, ...], INITIALIZED] = ()
    """Parameters that are initialized randomly nevertheless, such as output.weight or layers.7.*."""
    export_huggingface: bool = False
    """Also write the model of the last step in Hugging Face format, to the run folder."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    interval_steps: StepsOrZero = 0
    """Steps between evaluations on held-out documents; the last step is evaluated too; 0: never."""
    max_samples: Annotated[int, Constraint(min=0, max=10**9, unit="samples")] = 0
    """Samples per dataset and evaluation; 0: all."""
    datasets: Annotated[Mapping[str, str], PER_NODE] = field(default_factory=dict)
    """Datasets for evaluation only, in addition to the held-out documents: datasets = { wiki = "jsonl:/data/wiki.jsonl" }."""
    keep_best_on: str = ""
    """An evaluation dataset; the checkpoint with the lowest loss on it is always kept."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    interval_steps: Steps = 10
    """Steps between records; the first and the last step are always recorded."""
    tensorboard: bool = True
    """Write TensorBoard files next to metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    max_consecutive_skips: Count = 8
    """Consecutive steps that may be skipped because loss or gradient norm is non-finite or a spike."""
    on_max_skips: Literal["stop", "rollback"] = "stop"
    """Action after more skips. rollback: resume from the latest checkpoint and skip the samples of the failed steps."""
    max_rollbacks: Count = 3
    """Rollbacks after which the run stops."""
    on_loss_spike: Literal["off", "skip", "rollback"] = "off"
    """Action after a loss or gradient norm far above those of the last 128 steps. skip: skip the step; rollback: resume from
    the latest checkpoint and skip its samples."""
    spike_threshold_sigma: Annotated[
        float, Constraint(exclusive_min=0, max=10**6, used_with="[resilience] on_loss_spike = skip or rollback")
    ] = 6.0
    """Distance of a spike from the mean, in standard deviations."""
    straggler_ratio: Annotated[float | None, Constraint(exclusive_min=1)] = 1.5
    """Warn when a rank's block forward takes this many times the median rank's, or when waiting for its data stretches the step
    by this factor; none: never."""
    hang_timeout_s: Annotated[float, Constraint(min=0, max=10**7, unit="seconds")] = 300.0
    """Abort with every rank's stack when no step completes within this time and within 5 times the longest step so far. In the
    first step, evaluations and checkpoints only a missing heartbeat aborts. 0: never."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. Each attribute is a section of the TOML file."""

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
    """Setting -> where and how the user set it: {"training.steps": "--training.steps 5"}; without defaults."""

    def value(self, key: str) -> Any:
        """key: "section.name", or "section.table.entry" for the whole table."""
        section, name = key.split(".")[:2]
        return getattr(getattr(self, section), name)

    def explain(self, error: ConfigError) -> str:
        """Return the line for the user: the origin of the value, then the rule."""
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
    """Return a value as TOML; None, which TOML lacks, as the string "none"."""
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
