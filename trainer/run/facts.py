"""Facts of the compatibility table that follow from the model, the layout and the trained parameters."""

import torch
from torch import nn

from models.moe import CorrectedRouter, is_stack
from models.spec import Model, ModelSpec, Structure
from trainer.adapters.select import TrainedParameters, frozen_vocabulary, trained_base
from trainer.base.config import Config, ParallelConfig
from trainer.base.config.schema import facts
from trainer.base.config.schema.condition import Fact, Known
from trainer.checkpoint.formats.peft import PeftNames, unsupported_by_peft
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.parameter_storage import shards_parameters
from trainer.parallel.stages import splits_backward
from trainer.run.resolve_optimizer import ResolvedOptimizer


def model_facts(
    model: nn.Module, structure: Structure, name: str, parallel: ParallelConfig, compiled: bool, on_gpu: bool
) -> dict[Fact, Known]:
    """Return what is known before the degrees are divided.

    Args:
        model: The complete model.
        structure: How it may be sharded.
        name: Of the model, for messages.
        parallel: Degrees and schedule.
        compiled: Whether blocks are compiled.
        on_gpu: Whether the run has GPUs.
    """
    has_correction = any(isinstance(module, CorrectedRouter) for module in model.modules())
    installed = f"{torch.__version__} is installed"
    return {
        facts.HAS_EXPERTS: Known(structure.has_experts, f"{name} has none"),
        facts.HAS_CORRECTION: Known(has_correction, f"those of {name} have none"),
        facts.PREDICTS: Known(structure.num_predictions > 0, f"{name} has none"),
        facts.TIED: Known(bool(structure.tied)),
        facts.SHARES_TABLE: Known(bool(structure.table) and parallel.pp > 1),
        facts.SPLITS_BACKWARD: Known(splits_backward(parallel)),
        facts.COMPILED: Known(compiled),
        facts.GPU: Known(on_gpu),
        facts.TORCH_2_12: Known(torch.__version__ >= (2, 12), installed),
        facts.TORCH_2_13: Known(torch.__version__ >= (2, 13), installed),
    }


def trained_facts(
    config: Config,
    model: Model,
    spec: ModelSpec,
    sizes: object,
    dims: ParallelDims,
    trained: TrainedParameters,
    optimizer: ResolvedOptimizer,
) -> dict[Fact, Known]:
    """Return what is known when the trained parameters are.

    Args:
        config: Settings of the run.
        model: The complete model, without adapters.
        spec: Its family.
        sizes: Its dimensions.
        dims: Degrees.
        trained: The trained parameters.
        optimizer: Their groups.
    """
    structure, has_adapters = model.structure(), config.lora.rank is not None
    stack = next((name for name in trained.adapted if is_stack(model, name)), "")
    base = trained_base(model, structure, trained) if has_adapters else ""
    frozen = frozen_vocabulary(model, structure, trained)
    unsupported = unsupported_by_peft(PeftNames(spec, sizes), trained) if has_adapters else ""
    return {
        facts.FSDP: Known(shards_parameters(dims, structure, config.parallel)),
        facts.ADAPTED_EXPERTS: Known(bool(stack), f"such as {stack}"),
        facts.TRAINED_BASE: Known(bool(base), f"{base}, see [lora] train_fully"),
        facts.FROZEN_VOCABULARY: Known(bool(frozen), f"[lora] train_fully must include {frozen}"),
        facts.UNKNOWN_TO_PEFT: Known(bool(unsupported), unsupported),
        facts.DECAYS: Known(any(group.weight_decay for group in optimizer.groups)),
        facts.UPDATED_BY_MUON: Known(any(group.rule == "muon" for group in optimizer.groups)),
    }
