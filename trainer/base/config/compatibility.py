"""The table of combinations that are refused. `check`, `--help` and docs/compatibility.md read it.

A row says that a run for which one condition holds needs another one, or excludes it. It is checked as soon as all its facts are
known: when the configuration is loaded, if it has none; in `resolve`, if they are about the model or the layout; and so on.
Numbers that must divide each other, and files that are wrong, are no rows: they are refused where the knowledge is.
"""

import functools
import os
from dataclasses import dataclass
from types import MappingProxyType

from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import settings
from trainer.base.config.hub import names_a_folder
from trainer.base.config.schema.condition import (
    Condition,
    Dataset,
    Differs,
    Either,
    Evaluates,
    Fact,
    Facts,
    Known,
    When,
    all_of,
    one_of,
)
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.data import CHAT_DATASETS, COMPRESSED, READER_OF_ENDING, TYPES_THAT_NEED_PATH
from trainer.base.config.schema.facts import (
    ADAPTED_EXPERTS,
    COMPILED,
    DECAYS,
    EXPORTS_BEST,
    FLOAT8_DEVICE,
    FLOAT8_GPU,
    FROZEN_VOCABULARY,
    FSDP,
    GPU,
    GRADIENTS_COMPARED,
    GROUP_OF_MUON,
    HAS_EXPERTS,
    LOCAL_MODEL,
    OWN_OBJECTIVE,
    PLANNED,
    SHARES_TABLE,
    SPLITS_BACKWARD,
    STEPS_GIVEN,
    SWEPT,
    TIED,
    TORCH_2_12,
    TORCH_2_13,
    TRAINED_BASE,
    TRANSFORMERS,
    TYPED,
    UNKNOWN_TO_PEFT,
    UPDATED_BY_MUON,
    WIDTHS_COMPARED,
)


@dataclass(frozen=True)
class Row:
    """One refusal: `first` needs or excludes `second`."""

    first: Condition
    second: Condition
    reason: str = ""
    excludes: bool = True
    given: Condition | None = None
    """Condition under which the row applies, if it takes three."""

    @property
    def rule(self) -> str:
        """What a message says after the setting and its value."""
        verb = "is incompatible with" if self.excludes else "needs"
        if isinstance(self.first, Differs):
            verb = "has an effect only with"
        return f"{verb} {self.second.text}" + ("" if self.given is None else f" with {self.given.text}")

    def __str__(self) -> str:
        return f"{self.first.text} {self.rule}"

    @property
    def facts(self) -> frozenset[Fact]:
        given = frozenset() if self.given is None else self.given.facts
        return self.first.facts | self.second.facts | given

    def is_broken(self, config: Config, facts: Facts) -> bool:
        applies = self.first.holds(config, facts) and (self.given is None or self.given.holds(config, facts))
        return applies and self.second.holds(config, facts) == self.excludes

    def message(self, facts: Facts) -> str:
        """Return the broken rule, what is known about it, and its reason."""
        detail = facts[self.second].detail if isinstance(self.second, Fact) else ""
        return self.rule + (f" ({detail})" if detail else "") + (f": {self.reason}" if self.reason else "")


def needs(first: Condition, second: Condition, reason: str, given: Condition | None = None) -> Row:
    return Row(first, second, reason, excludes=False, given=given)


_ADAPTED = When("lora.rank")
_BASE_IN_4_BITS = When("lora.base_dtype", ("keep",), negated=True)
_BATCHWISE = When("training.reduce_every_microbatch")
_COMPARED = When("preference.loss", ("dpo", "ipo"))
_CPU_OFFLOAD = When("parallel.cpu_offload")
_FLOAT8 = When("training.float8")
_GRADIENTS_OFFLOADED = When("optimizer.offload", ("state_and_gradients",))
_GROUPS_OF_RANKS = When("parallel.reshard_after_forward", ("default", "always", "never"), negated=True)
_HELD_OUT = Either((When("data.held_out_fraction"), When("evaluation.datasets"), When("evaluation.tasks")))
_IN_BACKWARD = When("optimizer.in_backward")
_MUON = When("optimizer.name", ("muon",))
_OFFLOADED = When("optimizer.offload")
_OVERLAPPED = When("parallel.async_tensor_parallel")
_PAIRS = When("preference.loss")
_PIPELINE = When("parallel.pp", above=1)
_RANGE_TEST = When("lr_schedule.name", ("range_test",))
_TENSOR_PARALLEL = When("parallel.tp", above=1)

ROWS: tuple[Row, ...] = (
    # ---------------------------------------------------------------- model and data
    Row(When("model.revision"), LOCAL_MODEL, "only models of the Hub have revisions"),
    needs(
        When("tokenizer.backend", ("default",), negated=True), When("tokenizer.path"), "only the default one is shipped"
    ),
    needs(When("data.path"), TYPED, "a path does not tell how its files are read"),
    needs(When("data.dataset", TYPES_THAT_NEED_PATH), When("data.path"), "it names the files"),
    needs(Dataset(("preference",)), _PAIRS, "a pair is no document to train on"),
    Row(Dataset(("preference", "prepared"), negated=True), _PAIRS, "such a loss compares pairs of answers"),
    needs(_PAIRS, When("data.packing", ("best-fit", "none")), "a sample contains complete pairs"),
    needs(_PAIRS, When("data.long_documents", ("drop",)), "pairs are not divided"),
    needs(_PAIRS, When("data.document_mask"), "the answers of a sample are independent"),
    needs(_COMPARED, When("checkpoint.init_from"), "the loss compares the model with its initial weights"),
    # ---------------------------------------------------------------- steps and precision
    Row(When("training.epochs"), STEPS_GIVEN, "both are the length of the run; remove one of them"),
    Row(_FLOAT8, _BASE_IN_4_BITS, "products with matrices in 4 bits dequantize them"),
    needs(_FLOAT8, FLOAT8_DEVICE, "all products of the blocks are in float8"),
    needs(_FLOAT8, When("training.compute_dtype", ("bf16",)), "such kernels return bf16", given=FLOAT8_GPU),
    *(
        Row(When(f"training.{key}"), OWN_OBJECTIVE, "an objective computes its own loss")
        for key in ("z_loss", "prediction_weight")
    ),
    Row(
        When("training.prediction_weight"),
        _ADAPTED,
        "no reader of adapters knows the layers for multi-token prediction",
    ),
    # ---------------------------------------------------------------- adapters
    needs(_ADAPTED, When("checkpoint.init_from"), "adapters change a trained model"),
    Row(_ADAPTED, _GROUPS_OF_RANKS, "frozen units have no backward, and torch gathers the wrong shards of such units"),
    Row(When("checkpoint.init_exclude"), _ADAPTED, "the base model stays unchanged"),
    Row(When("checkpoint.init_averaged"), _ADAPTED, "scripts/convert_hf.py to-hf --averaged writes a base model"),
    Row(When("lora.dropout"), ADAPTED_EXPERTS, "they have no dropout; see [lora] targets"),
    Row(_BASE_IN_4_BITS, TRAINED_BASE, "base_dtype keeps it in 4 bits"),
    needs(_BASE_IN_4_BITS, TORCH_2_12, "one rank and tp alone need no FSDP", given=FSDP),
    Row(When("checkpoint.resize_embeddings"), FROZEN_VOCABULARY, "the rows of new tokens would stay untrained"),
    Row(
        When("checkpoint.export_huggingface"), UNKNOWN_TO_PEFT, "scripts/convert_hf.py merge writes the complete model"
    ),
    Row(When("experts.bias_rate"), _ADAPTED, "the correction belongs to the base model, which is frozen"),
    # ---------------------------------------------------------------- optimizer
    Row(_OFFLOADED, _CPU_OFFLOAD, "cpu_offload already keeps the optimizer state on the host"),
    Row(_GRADIENTS_OFFLOADED, _BATCHWISE, "only complete gradients can be offloaded"),
    Row(_GRADIENTS_OFFLOADED, GRADIENTS_COMPARED, "none are left after a step"),
    Row(_IN_BACKWARD, When("training.max_norm"), "clipping needs all gradients at once; set max_norm to none"),
    Row(_IN_BACKWARD, _BATCHWISE, "only the last microbatch completes gradients"),
    Row(_IN_BACKWARD, _OFFLOADED, "offload updates parameters only after backward"),
    Row(_IN_BACKWARD, _CPU_OFFLOAD, "cpu_offload copies gradients to the host too late"),
    Row(_IN_BACKWARD, When("resilience.on_loss_spike"), "a spike skips a complete step"),
    Row(_IN_BACKWARD, When("resilience.max_consecutive_skips", above=1), "no step can be skipped"),
    Row(_IN_BACKWARD, GRADIENTS_COMPARED, "none are left after a step"),
    Row(_MUON, _OFFLOADED, "Muon needs whole matrices on the device"),
    Row(_MUON, _CPU_OFFLOAD, "Muon needs whole matrices on the device"),
    Row(_MUON, _IN_BACKWARD, "Muon exchanges the matrices of all blocks at once"),
    Row(_MUON, When("optimizer.state_dtype", ("8bit",)), "only the moments of AdamW are quantized"),
    Row(_MUON, _ADAPTED, "nobody has shown a gain on adapters"),
    needs(_MUON, UPDATED_BY_MUON, "it would update nothing"),
    needs(GROUP_OF_MUON, _MUON, "other groups may then have optimizer = adamw"),
    needs(When("optimizer.cautious_decay"), DECAYS, "it would change nothing"),
    Row(When("optimizer.base_width"), _ADAPTED, "the matrices of adapters do not have the width of the model"),
    Row(
        When("optimizer.base_width"),
        TIED,
        "at larger widths, the output needs smaller values and rates, the embedding does not; set [model] "
        "overrides.tied_embeddings = false",
    ),
    needs(_RANGE_TEST, When("lr_schedule.min_lr_ratio"), "the rate rises from this fraction of the peak"),
    Row(_RANGE_TEST, When("lr_schedule.warmup_steps"), "the test is itself a rise"),
    needs(
        When("lr_schedule.name", ("warmup_stable_decay",)), When("lr_schedule.decay_steps"), "it ends with this decay"
    ),
    # ---------------------------------------------------------------- layout
    needs(When("parallel.ep", above=1), HAS_EXPERTS, "ep distributes experts"),
    Row(_PIPELINE, _BATCHWISE, "a pipeline reduces gradients once per step"),
    needs(
        _PIPELINE,
        TORCH_2_13,
        "older versions of FSDP wait for the embedding, which evaluations do not run in the last stage",
        given=When("training.prediction_weight"),
    ),
    *(
        Row(SHARES_TABLE, condition, "the gradients of both stages are added after backward")
        for condition in (_IN_BACKWARD, _GRADIENTS_OFFLOADED)
    ),
    needs(SPLITS_BACKWARD, TORCH_2_13, "older versions cannot split a backward with functions written in Python"),
    Row(
        SPLITS_BACKWARD,
        When("training.prediction_weight"),
        "torch would run parts of the last stage's backward twice, in which the embedding has several uses",
    ),
    Row(SPLITS_BACKWARD, COMPILED, "torch.compile does not support it"),
    Row(
        SPLITS_BACKWARD,
        When("activation_checkpoint.mode", ("selective",)),
        "the schedule traverses the backward graph twice",
    ),
    # torch looks up the weights after they have been resharded, and silently loses their gradients.
    needs(
        SPLITS_BACKWARD,
        When("parallel.reshard_after_forward", ("default", "never")),
        "the schedule uses weights again later",
    ),
    needs(When("activation_checkpoint.mode", ("budget",)), COMPILED, "the compiler applies the budget"),
    Row(When("activation_checkpoint.mode", ("budget",)), PLANNED, "the compiler selects the activations to save"),
    needs(_OVERLAPPED, COMPILED, "the compiler overlaps the communication", given=_TENSOR_PARALLEL),
    needs(
        _OVERLAPPED,
        When("parallel.sequence_parallel"),
        "gathers of the sequence are what is overlapped",
        given=_TENSOR_PARALLEL,
    ),
    needs(_OVERLAPPED, GPU, "the overlapped gathers use symmetric memory", given=_TENSOR_PARALLEL),
    # ---------------------------------------------------------------- checkpoints and observation
    needs(When("evaluation.interval_steps"), _HELD_OUT, "without evaluation, set interval_steps = 0"),
    needs(
        When("evaluation.averaged"),
        Either((Evaluates(), When("samples.prompts"))),
        "only evaluations, tasks and samples use these weights",
    ),
    *(
        needs(When(key, ("best",)), other, "evaluations choose the best checkpoint")
        for key in ("checkpoint.load_step", "checkpoint.export_checkpoint")
        for other in (When("evaluation.keep_best_on"), Evaluates())
    ),
    *(
        needs(
            When(one),
            When(other),
            "the best weights are those evaluated; export_checkpoint = last needs neither",
            EXPORTS_BEST,
        )
        for one, other in (
            ("checkpoint.export_averaged", "evaluation.averaged"),
            ("evaluation.averaged", "checkpoint.export_averaged"),
        )
    ),
    needs(When("resilience.on_loss_spike", ("rollback",)), When("checkpoint.enabled"), "it resumes from a checkpoint"),
    *(
        needs(
            When("metrics.sinks", (sink,)),
            When("metrics.sinks", ("jsonl",)),
            "it delivers the records of metrics.jsonl",
        )
        for sink in ("tensorboard", "wandb", "mlflow", "trackio")
    ),
    needs(SWEPT, When("metrics.sinks", ("jsonl",)), "it compares the records of metrics.jsonl"),
    # ---------------------------------------------------------------- comparisons
    Row(When("checkpoint.init_from"), WIDTHS_COMPARED, "models of other widths start from random weights"),
    *(
        Row(When(key), TRANSFORMERS, reason)
        for key, reason in {
            "lora.rank": "transformers has no adapters; compare with one rank",
            "preference.loss": "transformers has no preference losses; compare with one rank",
            "experts.balance_loss": "transformers defines the losses of routers otherwise",
            "experts.z_loss": "transformers defines the losses of routers otherwise",
            "training.float8": "transformers has no float8",
            "training.prediction_weight": "transformers does not train layers for multi-token prediction",
        }.items()
    ),
)
"""All rows but those of `only_with`. Earlier ones are reported first."""


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return the complete table: the rows of `only_with` of each setting, then ROWS."""
    declared = (
        Row(Differs(setting.key, default=setting.default), condition, excludes=False)
        for setting in settings().values()
        for condition in setting.constraint.only_with
    )
    return (*declared, *ROWS)


def check(config: Config, facts: Facts = MappingProxyType({})) -> None:
    """Raise ConfigError for the first row that a run breaks. facts: those that the caller knows; rows with others are not
    checked."""
    known = {**_facts_of_settings(config), **facts}
    for row in rows():
        if row.facts <= known.keys() and row.is_broken(config, known):
            raise ConfigError(row.first.key(config, known), row.message(known))


def restrictions(key: str) -> list[str]:
    """Return what the table says about a setting, as --help and docs/configuration.md show it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows():
        given = "" if row.given is None else f" with {row.given.text}"
        if row.first.setting == key:
            verb = "only with" if isinstance(row.first, Differs) else "not with" if row.excludes else "needs"
            found.setdefault((row.first.own_value, verb), []).append(f"{row.second.text}{given}")
        if row.second.setting == key and row.excludes:
            found.setdefault((row.second.own_value, "not with"), []).append(f"{row.first.text}{given}")
    return [f"{own} {verb} {all_of(others)}".strip() for (own, verb), others in found.items()]


# ---------------------------------------------------------------- facts that need only settings and paths


def _types_for(path: str) -> str:
    """Return the values of data.dataset that read a path, in English."""
    name = path.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    reader = READER_OF_ENDING.get(os.path.splitext(name)[1])
    if reader is None:
        return one_of([*dict.fromkeys(READER_OF_ENDING.values()), *CHAT_DATASETS])
    return reader if reader in ("text", "tokens") else one_of([f"{reader} (texts)", *CHAT_DATASETS])


def _facts_of_settings(config: Config) -> dict[Fact, Known]:
    data, training, source = config.data, config.training, config.model.pretrained
    with_muon = (pattern for pattern, given in config.optimizer.groups.items() if given.get("optimizer") == "muon")
    pattern = next(with_muon, None)
    is_local = names_a_folder(source)
    steps_given = "training.steps" in config.origins or training.steps != settings()["training.steps"].default
    is_typed = data.dataset != "python_stdlib" or bool(data.datasets)
    finds_best = config.evaluation.keep_best_on != "" and config.evaluation.evaluates
    exports = config.checkpoint.export_huggingface or config.checkpoint.export_gguf != "none"
    exported = config.checkpoint.export_checkpoint if exports else "none"
    return {
        EXPORTS_BEST: Known(exported == "best" or (exported == "auto" and finds_best)),
        STEPS_GIVEN: Known(steps_given, f"steps = {training.steps} is set too"),
        GROUP_OF_MUON: Known(pattern is not None, setting=f"optimizer.groups.{pattern}"),
        TYPED: Known(is_typed, f"set [data] dataset to {_types_for(data.path)}"),
        LOCAL_MODEL: Known(bool(source) and is_local),
    }
