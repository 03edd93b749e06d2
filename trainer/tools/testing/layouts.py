"""Helpers for scripts/parity.py, scripts/dev/ and the tests: layouts as text, settings of small runs, and tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from models import MODELS
from trainer.base.config import Config, ConfigError, ParallelConfig
from trainer.base.config.flags import parse_argv
from trainer.base.config.load import load_config
from trainer.base.system.spelling import did_you_mean
from trainer.parallel.stages import SCHEDULES, min_microbatches
from trainer.run.resolve import resolve

DEBUG_FAMILIES = [name for name, spec in MODELS.items() if "debug" in spec.by_size]
"""Model families with a size for a laptop."""
_CHANGING_BATCH = "training.batch_schedule.1=48 training.batch_schedule.2=32"
PARITY_MATRIX = [
    *(f"dp_shard={n}" for n in (2, 4, 8)),
    "dp_replicate=2",
    "dp_replicate=2 dp_shard=2",
    "dp_replicate=2 dp_shard=4",
    *(f"tp={n}" for n in (2, 4)),
    "tp=2 sequence_parallel=false",
    "dp_shard=2 tp=2",
    "dp_replicate=2 dp_shard=2 tp=2",
    *(f"cp={n}" for n in (2, 4)),
    "dp_shard=2 cp=2",
    "cp=2 tp=2",
    "dp_shard=2 cp=2 tp=2",
    *(f"pp={n} pipeline_schedule={schedule}" for n in (2, 4) for schedule in SCHEDULES),
    "dp_shard=2 pp=2",
    "tp=2 pp=2",
    "cp=2 pp=2",
    "dp_shard=2 tp=2 pp=2",
    "dp_shard=2 pp=2 pipeline_schedule=ZBVZeroBubble",
    "dp_shard=2 pp=2 reshard_after_forward=always",
    "dp_shard=2 pp=2 pipeline_schedule=Interleaved1F1B reshard_after_forward=always",
    *(f"dp_shard=2 reshard_after_forward={policy}" for policy in ("always", "never")),
    "dp_shard=4 reshard_after_forward=2",
    "dp_shard=2 fsdp_prefetch=2",
    "dp_shard=2 cpu_offload=true",
    "dp_shard=2 training.reduce_every_microbatch=true",
    *(f"{layout} activation_checkpoint.mode=full" for layout in ("dp_shard=2", "tp=2", "cp=2", "tp=2 pp=2")),
    *(f"{layout} activation_checkpoint.mode=selective" for layout in ("dp_shard=2", "tp=2", "cp=2", "tp=2 pp=2")),
    *(f"{layout} activation_checkpoint.recompute_all_gather=false" for layout in ("tp=2", "cp=2", "tp=2 pp=2")),
    "dp_shard=2 tp=2 activation_checkpoint.mode=full activation_checkpoint.every_n_blocks=2",
    "tp=2 activation_checkpoint.mode=selective activation_checkpoint.save_every_nth_matmul=2",
    "pp=2 pipeline_schedule=ZBVZeroBubble activation_checkpoint.mode=full",
    *(f"{layout} model.overrides.tied_embeddings=true" for layout in ("dp_shard=2", "tp=2", "dp_shard=2 cp=2 tp=2")),
    *(f"pp=2 pipeline_schedule={schedule} model.overrides.tied_embeddings=true" for schedule in SCHEDULES),
    *(f"{layout} pp=2 model.overrides.tied_embeddings=true" for layout in ("dp_shard=2", "tp=2", "cp=2")),
    "dp_shard=2 pp=2 pipeline_schedule=ZBVZeroBubble model.overrides.tied_embeddings=true",
    *(f"{layout} model.overrides.n_kv_heads=2" for layout in ("tp=2", "cp=2")),
    *(f"{layout} training.compute_dtype=bf16" for layout in ("dp_shard=2", "tp=2", "cp=2", "pp=2", "dp_shard=2 tp=2 pp=2")),
    "pp=2 pipeline_schedule=ZBVZeroBubble training.compute_dtype=bf16",
    "dp_shard=2 reduce_dtype=bf16 training.compute_dtype=bf16",
    *(f"{layout} compile.enabled=true" for layout in ("dp_shard=1", "dp_shard=2", "tp=2", "cp=2", "pp=2")),
    "dp_shard=2 tp=2 compile.enabled=true activation_checkpoint.mode=selective",
    "dp_shard=2 tp=2 compile.enabled=true activation_checkpoint.mode=full",
    "tp=2 compile.enabled=true activation_checkpoint.mode=budget",
    *(f"{layout} {_CHANGING_BATCH}" for layout in ("dp_shard=2", "tp=2 pp=2 pipeline_schedule=Interleaved1F1B")),
]  # fmt: skip
EXPERT_MATRIX = [
    *(f"dp_shard={n} ep={n}" for n in (2, 4)),
    "dp_shard=4 ep=2",
    "dp_replicate=2 dp_shard=2 ep=2",
    "tp=2 ep=2",
    "tp=2 ep=2 sequence_parallel=false",
    "dp_shard=2 tp=2 ep=2",
    "dp_shard=2 tp=2 ep=4",
    "cp=2 ep=2",
    "cp=2 tp=2 ep=4",
    *(f"dp_shard=2 pp=2 ep=2 pipeline_schedule={schedule}" for schedule in SCHEDULES),
    "dp_shard=2 pp=2 ep=2 reshard_after_forward=always",
    *(f"dp_shard=2 ep=2 reshard_after_forward={policy}" for policy in ("always", "never")),
    "dp_shard=4 ep=2 fsdp_prefetch=2",
    "dp_shard=2 ep=2 cpu_offload=true",
    "dp_shard=2 ep=2 training.reduce_every_microbatch=true",
    *(f"{layout} activation_checkpoint.mode=full" for layout in ("dp_shard=2 ep=2", "tp=2 ep=2")),
    *(f"{layout} activation_checkpoint.mode=selective" for layout in ("dp_shard=2 ep=2", "tp=2 ep=2")),
    "dp_shard=2 pp=2 ep=2 pipeline_schedule=ZBVZeroBubble activation_checkpoint.mode=full",
    "dp_shard=2 ep=2 data.document_mask=true",
    *(f"{layout} training.compute_dtype=bf16" for layout in ("dp_shard=2 ep=2", "tp=2 ep=2")),
    "dp_shard=2 ep=2 reduce_dtype=bf16 training.compute_dtype=bf16",
    *(f"{layout} compile.enabled=true" for layout in ("dp_shard=1", "dp_shard=2 ep=2", "tp=2 ep=2")),
    *(f"dp_shard=2 ep=2 compile.enabled=true activation_checkpoint.mode={mode}" for mode in ("full", "selective")),
    *(f"{layout} {_CHANGING_BATCH}" for layout in ("dp_shard=2 ep=2", "dp_shard=2 pp=2 ep=2")),
]  # fmt: skip
"""Layouts of models with experts, besides those of PARITY_MATRIX."""

LAYOUT_SECTIONS = ("parallel", "activation_checkpoint", "compile")
"""Sections of the configuration whose settings do not change the result of training."""

LLAMA_100M = {
    **{"model.overrides.dim": "768", "model.overrides.n_layers": "12", "model.overrides.n_heads": "12"},
    **{"model.overrides.n_kv_heads": "4", "model.overrides.hidden_dim": "2048", "model.overrides.vocab_size": "16384"},
    **{"training.seq_len": "512", "training.local_batch_size": "1", "training.global_batch_size": "4"},
}
"""Model and batch settings of a model with 100M parameters, for measurements on a CPU."""
MIXTRAL_50M = LLAMA_100M | {
    **{"model.name": "mixtral", "model.overrides.dim": "512", "model.overrides.n_layers": "4"},
    **{"model.overrides.n_heads": "8", "model.overrides.head_dim": "64", "model.overrides.hidden_dim": "768"},
    "model.overrides.vocab_size": "8192",
}
"""The same of a model with 8 experts in each layer and 50M parameters."""


@dataclass(frozen=True)
class Layout:
    text: str
    settings: dict[str, str]
    """ "section.key" -> value, as on a command line."""

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse a layout, such as "tp=2 activation_checkpoint.mode=full". Settings of [parallel] are written without their
        section. dp_shard defaults to 1. Raises ConfigError if the text is invalid."""
        parallel = {field.name for field in fields(ParallelConfig)}
        settings: dict[str, str] = {}
        for word in text.split() or [""]:
            name, equals, value = word.partition("=")
            key = f"parallel.{name}" if name in parallel else name
            if not equals or not name:
                message = f"{word}: expected name=value"
            elif "." not in key:
                message = f"{name}: is not a setting of [parallel]{did_you_mean(name, parallel)}"
            elif name == "dp_shard" and value == "-1":
                message = "dp_shard must be a number of ranks here (default: 1)"
            elif key in settings:
                message = f"{word}: {name} is given twice"
            else:
                settings[key] = value
                continue
            raise ConfigError("", f"--layout {text!r}: {message}")
        return cls(text, {"parallel.dp_shard": "1"} | settings)

    @property
    def single_rank_settings(self) -> dict[str, str]:
        """Settings that change the result of training. The reference run on one rank must use them too."""
        return {k: v for k, v in self.settings.items() if k.split(".")[0] not in LAYOUT_SECTIONS}


def flags(settings: dict[str, str]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def settings_of(argv: Sequence[str]) -> dict[str, str]:
    """Return the settings on a command line as "section.key" -> value."""
    return {flag.removeprefix("--"): value for flag, value in parse_argv(argv).items()}


def with_default_model(settings: dict[str, str], default: Mapping[str, str] = LLAMA_100M) -> dict[str, str]:
    """Return the settings, with those of a default model unless they name a configuration file or a model size."""
    return settings if {"config", "model.size"} & set(settings) else {**default, **settings}


def num_ranks(parallel: ParallelConfig) -> int:
    return math.prod(getattr(parallel, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))


def load_layout(argv: Sequence[str]) -> Config:
    """Load the configuration of a layout. If the layout cannot run, raise ConfigError with the complete line for the user."""
    config = load_config(argv)
    with config.explained_errors():
        resolve(config, num_ranks(config.parallel))
    return config


def batch_settings(config: Config, factor: int) -> tuple[dict[str, str], int]:
    """Return the local batch size as a setting, and the number of microbatches per rank. This number is `factor` times the
    layout's minimum. Raises ConfigError if the global batch size cannot be divided evenly."""
    parallel, batch = config.parallel, config.training.global_batch_size
    microbatches = factor * min_microbatches(parallel)
    together = parallel.dp_replicate * parallel.dp_shard * microbatches
    if batch % together:
        message = f"{batch} must be a multiple of {together}, the number of microbatches on all data-parallel ranks"
        raise ConfigError("training.global_batch_size", message)
    return {"training.local_batch_size": str(batch // together)}, microbatches


class Table:
    """A table that is printed row by row."""

    def __init__(self, **columns: str):
        """columns: heading -> format specification, such as ">8" ("_" in a heading is printed as a space)."""
        self.specs = list(columns.values())
        self.row(*(heading.replace("_", " ") for heading in columns))

    def row(self, *cells: object) -> None:
        """Print a row. It may have fewer cells than columns. Cells beyond the last column are printed without formatting."""
        specs = [*self.specs, *[""] * len(cells)]
        print(*(f"{cell!s:{spec}}" for cell, spec in zip(cells, specs, strict=False)), flush=True)
