"""Settings of the optimizer steps: batches, precision, optimizer, learning rate, loss."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal, TypedDict

from trainer.base.config.schema.condition import When
from trainer.base.config.schema.constraint import FIXED, PER_NODE, Constraint, CountOrZero, Fraction, Steps, StepsOrZero
from trainer.base.config.schema.facts import PREDICTS

PREFERRED = Constraint(only_with=(When("preference.loss"),))
FLOAT8 = Constraint(only_with=(When("training.float8"),))
MUON = Constraint(only_with=(When("optimizer.name", ("muon",)),))
PREDICTING = Constraint(only_with=(When("preference.loss", ("none",)), PREDICTS))
SAMPLES = Constraint(min=1, max=10**7, unit="samples")
Samples = Annotated[int, SAMPLES]


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
    """Number of samples in one optimizer step, over all ranks and microbatches; with batch_schedule, in the first steps."""
    batch_schedule: Annotated[Mapping[str, int], SAMPLES, Constraint(free_keys=True)] = field(default_factory=dict)
    """Batch sizes of later steps (docs/data.md): { 1000 = 64, 4000 = 128 } trains with global_batch_size samples up to step
    1000, with 64 samples from step 1001 on, and with 128 from step 4001 on."""
    local_batch_size: Samples = 1
    """Number of samples in one microbatch on one data-parallel rank. Several microbatches make up the global batch."""
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of forward and backward."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Scales of the products in float8 that linear modules of the blocks compute instead of compute_dtype: one for each factor,
    or one for each of its rows (docs/low_precision.md). "none": no float8. The output, routers and experts never use float8."""
    float8_exclude: Annotated[tuple[str, ...], FLOAT8] = ()
    """Names or patterns of linear modules that compute in compute_dtype: "*.wk", "layers.0.*"."""
    parameter_dtype: Annotated[Literal["fp32", "bf16"], FIXED] = "fp32"
    """Precision of the parameters between steps. bf16 needs half as much memory as fp32, but rounding loses small updates unless
    [optimizer] offload keeps an fp32 copy."""
    max_norm: Annotated[float | None, Constraint(exclusive_min=0)] = 1.0
    """Maximum global gradient norm. Gradients with a larger norm are scaled down to this norm. "none": no clipping."""
    reduce_every_microbatch: bool = False
    """Whether to reduce gradients after each microbatch instead of once per step. This saves memory but adds communication."""
    loss_chunk_tokens: Annotated[int, Constraint(min=1, max=10**8, unit="tokens")] = 1024
    """Maximum number of tokens whose logits are held in memory at once."""
    z_loss: Annotated[float, Constraint(min=0, max=1e6, only_with=(When("preference.loss", ("none",)),))] = 0.0
    """Coefficient of the z-loss, the mean squared logsumexp of a target's logits (arXiv:2204.02311), which is added to what is
    minimized, but not to the loss that is logged; usual: 1e-5 to 1e-4. 0: no z-loss."""
    prediction_weight: Annotated[float, Constraint(min=0, max=1e6), PREDICTING] = 0.0
    """Weight of the mean loss of the layers for multi-token prediction (docs/models.md), which is added to what is minimized, but
    not to the loss that is logged; usual: 0.1 to 0.3. 0: the run has no such layers, also if its initial model has."""
    cpu_threads: Annotated[CountOrZero, PER_NODE] = 0
    """Number of threads per rank for CPU operators, at most the node's cores; 0: `OMP_NUM_THREADS` if it is set, otherwise the
    cores divided by the node's ranks."""

    @property
    def batch_sizes(self) -> tuple[tuple[int, int], ...]:
        """Each batch size with the number of completed steps from which on it applies, in ascending order: (steps, samples)."""
        later = sorted((int(steps), size) for steps, size in self.batch_schedule.items())
        return ((0, self.global_batch_size), *later)

    @property
    def largest_batch_size(self) -> int:
        return max(size for _, size in self.batch_sizes)

    def batch_size(self, step: int) -> int:
        """Return the number of samples in a step. step: its number, from 1."""
        return next(size for first, size in reversed(self.batch_sizes) if first < step)

    def samples_between(self, done: int, last: int) -> int:
        """Return the number of samples in the steps after step `done`, up to and including step `last`."""
        spans = pairwise((*self.batch_sizes, (max(done, last), 0)))
        return sum(size * max(0, min(end, last) - max(first, done)) for (first, size), (end, _) in spans)

    def steps_to_consume(self, samples: int, done: int) -> int:
        """Return the number of steps after step `done` that consume at least this number of samples."""
        return bisect_left(range(max(0, samples)), samples, key=lambda n: self.samples_between(done, done + n))


Rule = Literal["adamw", "muon"]


class GroupOptions(TypedDict, total=False):
    """Options of the parameters that a pattern of [optimizer] groups selects."""

    lr: Annotated[float, Constraint(min=1e-6, max=1e6)]
    """Factor of the learning rate."""
    decay: Annotated[float, Constraint(min=0, max=1e3)]
    """Replaces weight_decay."""
    optimizer: Rule
    """Replaces name."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Annotated[Rule, FIXED] = "adamw"
    """Name of the optimizer. "muon" updates the matrices of the blocks' linear modules and of experts, and AdamW all other
    parameters (docs/optimizers.md)."""
    lr: Annotated[float, Constraint(exclusive_min=0)] = 3e-4
    """Peak learning rate."""
    groups: Annotated[Mapping[str, GroupOptions], Constraint(free_keys=True)] = field(default_factory=dict)
    """Options of parameters by pattern of their names (docs/optimizers.md); the first matching pattern counts:
    { "tok_embeddings.*" = { lr = 0.3, decay = 0 }, "*lora_b" = { lr = 16 } }. "lr" is a factor of the learning rate, "decay"
    replaces weight_decay, "optimizer" replaces name."""
    base_width: Annotated[int | None, Constraint(min=1, max=2**24, fixed_on_resume=True)] = None
    """Width (`dim`) of the model for which lr and weight_decay were tuned. Initial values and rates then follow the width of this
    model (docs/optimizers.md). "none": they hold for this model."""
    betas: Annotated[tuple[float, float], Constraint(min=0, max=0.999999)] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Annotated[float, Constraint(exclusive_min=0)] = 1e-8
    """Term added to the denominator of the update."""
    weight_decay: Annotated[float, Constraint(min=0)] = 0.1
    """Decoupled weight decay of matrices. Norms and biases are not decayed, unless [optimizer] groups says so."""
    cautious_decay: bool = False
    """Whether to decay only the values that the step's update moves towards zero too (arXiv:2510.12402)."""
    state_dtype: Annotated[Literal["fp32", "bf16", "8bit"], FIXED] = "fp32"
    """Precision of the moments. Updates are computed in fp32. bf16 halves the memory, but for betas above about 0.99 small
    changes are lost to rounding. 8bit quarters the memory of matrices whose row length is a multiple of 256."""
    ema_decay: Annotated[float | None, Constraint(exclusive_min=0, max=0.9999999)] = None
    """Decay rate of an exponential moving average of the weights, such as 0.999, in fp32 and saved with each checkpoint
    ([evaluation] averaged, [checkpoint] export_averaged). After n steps it is at most (1 + n) / (10 + n). "none": no average."""
    offload: Literal["none", "state", "state_and_gradients"] = "none"
    """Tensors to keep in host memory; the CPU then computes the update. "state": the moments and an fp32 copy of the parameters.
    Gradients are copied when the update starts. "state_and_gradients": the same, but gradients are copied during backward."""
    in_backward: bool = False
    """Whether to update each parameter during backward, as soon as its gradient is reduced, and then free the gradient.
    Incompatible with clipping and with skipping steps, because both need the global gradient norm before any update."""

    muon_lr: Annotated[float | None, MUON, Constraint(exclusive_min=0)] = None
    """Peak learning rate of the matrices that Muon updates. "none": lr."""
    muon_momentum: Annotated[float, MUON, Constraint(min=0, max=0.999999)] = 0.95
    """Decay rate of Muon's momentum."""
    muon_nesterov: Annotated[bool, MUON] = True
    """Whether Muon orthogonalizes a mean of gradient and momentum instead of the momentum."""
    muon_scale: Annotated[Literal["match_adamw", "original", "unit_rms"], MUON] = "match_adamw"
    """Factor of Muon's updates of a matrix with m rows and n columns. "match_adamw": 0.2 sqrt(max(m, n)), with which AdamW's
    learning rate and weight decay suit; "original": sqrt(max(1, m / n)); "unit_rms": sqrt(m / n)."""
    muon_coefficients: Annotated[Literal["jordan", "polar_express"], MUON] = "jordan"
    """Coefficients of the five steps in which Muon orthogonalizes a matrix."""
    muon_dtype: Annotated[Literal["auto", "fp32", "bf16"], MUON] = "auto"
    """Precision in which Muon orthogonalizes. "auto": [training] compute_dtype."""

    @property
    def frees_gradients(self) -> bool:
        """Whether each gradient is used and freed during backward, as soon as it is reduced."""
        return self.in_backward or self.offload == "state_and_gradients"


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    loss: Annotated[Literal["none", "dpo", "ipo", "simpo", "orpo"], FIXED] = "none"
    """Loss on pairs of a chosen and a rejected answer. "none": train on every target token. "dpo" and "ipo" compare the model
    with its initial weights, and compute the log-probabilities of all answers before the first step."""
    beta: Annotated[float, PREFERRED, Constraint(exclusive_min=0, max=1000, fixed_on_resume=True)] = 0.1
    """Factor of the implicit rewards in "dpo" and "simpo", regularization strength in "ipo", weight of the odds ratio in "orpo".
    Usual values: 0.1 for all losses except "simpo", which needs about 2."""
    margin: Annotated[
        float, Constraint(min=0, max=1000, fixed_on_resume=True, only_with=(When("preference.loss", ("simpo",)),))
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
    decay_steps: Annotated[StepsOrZero, Constraint(only_with=(When("lr_schedule.name", ("warmup_stable_decay",)),))] = 0
    """Number of steps of the final decay of "warmup_stable_decay". "cosine" and "linear" decay over all steps after warm-up."""
    min_lr_ratio: Annotated[Fraction, Constraint(used_with=When("lr_schedule.name", ("constant",), negated=True))] = 0.1
    """Final learning rate (of "range_test": the first one), as a fraction of the peak learning rate."""
