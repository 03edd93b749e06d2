"""Settings of the execution on the ranks: parallelism, recomputation, compilation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trainer.base.config.schema.condition import When
from trainer.base.config.schema.constraint import Constraint, Count, CountOrZero, Fraction
from trainer.base.config.schema.facts import HAS_CORRECTION, HAS_EXPERTS

PIPELINE = Constraint(used_with=When("parallel.pp", above=1))
WITH_EXPERTS = Constraint(only_with=(HAS_EXPERTS,))
SELECTIVE = Constraint(used_with=When("activation_checkpoint.mode", ("selective",)))
Degree = Annotated[int, Constraint(min=1, max=10**6, unit="ranks")]
Saveable = Literal["matmuls", "attention", "reduce_scatters", "exchanges"]


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
    sequence_parallel: Annotated[bool, Constraint(used_with=When("parallel.tp", above=1))] = True
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
    balance_loss: Annotated[float, WITH_EXPERTS, Constraint(min=0, max=1e6)] = 0.0
    """Coefficient of the balance loss, which is 1 for each layer if all experts get equally many tokens (arXiv:2101.03961). It is
    computed for each layer and sample, averaged over the samples of a step, and summed over the layers. 0: no balance loss."""
    z_loss: Annotated[float, WITH_EXPERTS, Constraint(min=0, max=1e6)] = 0.0
    """Coefficient of the routers' z-loss, the mean squared logsumexp of a token's logits (arXiv:2202.08906); averaged over
    samples and summed over layers like the balance loss. 0: no z-loss."""
    bias_rate: Annotated[float, Constraint(min=0, max=1, only_with=(HAS_EXPERTS, HAS_CORRECTION))] = 0.0
    """Change per step of the correction that routers of DeepSeek-V3 add to the scores (arXiv:2408.15664): by this number up for
    each expert with less than the mean load of the step, and down for each with more. 0: the correction does not change."""
    center_bias: Annotated[bool, Constraint(only_with=(When("experts.bias_rate"),))] = False
    """Whether the mean of a step's changes is subtracted from them, so that the mean of a layer's correction stays the same."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    mode: Literal["none", "full", "selective", "budget"] = "none"
    """Activations that blocks recompute in backward. "none": no activations; "full": all activations; "selective": all except the
    results of operators in `save`; "budget": activations that the compiler selects to meet memory_budget."""
    save: Annotated[tuple[Saveable, ...], SELECTIVE] = ("matmuls", "attention", "reduce_scatters", "exchanges")
    """Operators whose results are saved for backward instead of being recomputed. "exchanges": of rows between experts' ranks."""
    save_every_nth_matmul: Annotated[Count, SELECTIVE] = 1
    """Interval n: if `save` contains "matmuls", the result of only every n-th matmul of a block is saved."""
    every_n_blocks: Annotated[
        Count, Constraint(used_with=When("activation_checkpoint.mode", ("full", "selective")))
    ] = 1
    """Interval n: the mode applies to every n-th block, starting with the first block."""
    offload_inputs: Annotated[bool, Constraint(only_with=(When("activation_checkpoint.mode", ("full",)),))] = False
    """Whether the saved inputs of blocks are kept in host memory between forward and backward."""
    recompute_all_gather: bool = True
    """Whether to repeat the all-gathers of tp (inputs of column-wise matmuls) and cp (keys and values) in backward; false: save
    the gathered tensors for backward. The setting affects no other operator."""
    memory_budget: Annotated[Fraction, Constraint(used_with=When("activation_checkpoint.mode", ("budget",)))] = 0.5
    """Maximum activation memory, as a fraction of the activation memory with mode = "none"."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    enabled: Literal["auto"] | bool = "auto"
    """Whether to compile each block and, without tensor parallelism, the loss (torch.compile). "auto": on GPUs, if the node has
    a C compiler and Python's headers, and the pipeline schedule allows it."""
