"""Published bugs, injected into a run as negative controls of scripts/parity.py and scripts/leak_probe.py."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from models import llama
from models.rope import rotate_halves
from models.spec import meta_model, tensor_styles
from trainer.adapters import apply as adapters
from trainer.adapters import nf4
from trainer.base.config import Config
from trainer.base.config.schema.data import CHAT_DATASETS
from trainer.batch import Batch
from trainer.engine import Engine
from trainer.objective import cross_entropy, preference
from trainer.objective.prediction import with_future
from trainer.optim import muon
from trainer.optim.exchange import Matrix, Sharding
from trainer.parallel import balance, experts, float8, tensor
from trainer.parallel import step as steps
from trainer.parallel.activation_checkpoint import Forward
from trainer.parallel.attention import Mask
from trainer.parallel.balance import Balance, ExpertLoad
from trainer.parallel.experts import AllToAllExchange
from trainer.parallel.pipeline import PipelineStep
from trainer.parallel.step import SpmdStep
from trainer.run.resolve import ResolvedRun
from trainer.runtime.dtensor import to_local
from trainer.tools.testing import recurrence_bugs


@dataclass(frozen=True)
class Bug:
    """A bug, and the runs in which it shows."""

    layouts: tuple[str, ...]
    """Layouts in which the bug shows. The first that fits a configuration is used."""
    inject: Callable[[], AbstractContextManager]
    applies: Callable[[Config, ResolvedRun], bool] = lambda config, resolved: True
    """Function (configuration, resolved run) -> whether the bug can show in a run of this configuration."""
    microbatches: int = 1
    """Number of microbatches of each rank, as a multiple of the layout's minimum."""
    leaks: bool = False
    """Whether the bug makes positions visible that must not be."""
    needs_transformers: bool = False
    """Whether the bug shows only in a comparison with transformers, because it affects all layouts equally."""
    parameters: str = ""
    """Part of the names of the parameters whose gradients are wrong; empty: all."""


def _averaged() -> AbstractContextManager:
    original = FSDPModule.set_gradient_divide_factor
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda module, factor: original(module, 2.0))


def _head_norms_not_reduced() -> AbstractContextManager:
    """Treat each rank's heads as replicated, so that no reduction follows."""
    original, wrong = tensor.styles, {"head_norm": tensor._Norm(Replicate())}
    return patch.object(tensor, "styles", lambda *args, **kwargs: original(*args, **kwargs) | wrong)


def _after_init(cls: type, change: Callable[[Any], None]) -> AbstractContextManager:
    """Return a context manager. Inside it, `change` is applied to each new object of the class."""
    original = cls.__init__

    def init(instance: Any, *args: Any) -> None:
        original(instance, *args)
        change(instance)

    return patch.object(cls, "__init__", init)


def _count_twice(engine: Engine, part: str) -> None:
    """Double the gradients of the parameters in whose names `part` is."""
    step = engine.forward_backward
    original = step._forward_backward

    def forward_backward(*args: Any) -> Sequence[Tensor]:
        results = original(*args)
        for name, parameter in engine.parameters.items():
            if part in name and parameter.grad is not None:
                parameter.grad.mul_(2)
        return results

    step._forward_backward = forward_backward


def _averaged_per_microbatch() -> AbstractContextManager:
    """Divide the loss of each microbatch by its own number of terms."""
    original = SpmdStep._forward_backward

    def forward_backward(step: SpmdStep, microbatches: Sequence[Batch], num_terms: Tensor) -> Sequence[Tensor]:
        counts = [step.objective.count(b).clamp(min=1) * len(microbatches) for b in microbatches]
        return [r for b, count in zip(microbatches, counts, strict=True) for r in original(step, [b], count)]

    return patch.object(SpmdStep, "_forward_backward", forward_backward)


def _weight_of_experts_in_norm(engine: Engine, factor: float) -> None:
    optimizer = engine.optimizer
    of_experts = torch.tensor([".experts." in name for name in optimizer.names.values()])
    optimizer.shares = optimizer.shares.where(~of_experts, optimizer.shares * factor)


def _rows_detached() -> AbstractContextManager:
    original = AllToAllExchange.forward
    return patch.object(
        AllToAllExchange,
        "forward",
        lambda exchange, experts, rows, counts: original(exchange, experts, rows.detach(), counts),
    )


def _sliced_sequence(forward: Forward, tp: DeviceMesh, x: Tensor, *args: Any) -> Tensor:
    """Slice the sequence without a gather in backward."""
    own = x.chunk(tp.size(), 1)[tp.get_local_rank()]
    result = DTensor.from_local(forward(own, *args), tp, [Shard(1)], run_check=False)
    return result.redistribute(placements=[Replicate()]).to_local()


def _losses_detached() -> AbstractContextManager:
    original = Balance._losses
    return patch.object(Balance, "_losses", lambda *args: original(*args).detach())


def _divided_by_one_microbatch() -> AbstractContextManager:
    """Divide the losses of routers by half the samples of a step, which has two microbatches."""
    original = ExpertLoad.start_step
    return patch.object(
        ExpertLoad, "start_step", lambda expert_load, num_samples: original(expert_load, num_samples // 2)
    )


def _load_of_one_rank() -> AbstractContextManager:
    original = ExpertLoad.take

    def take(expert_load: ExpertLoad) -> dict[str, Tensor]:
        with patch.object(balance, "sum_over", lambda counts, group: counts):
            return original(expert_load)

    return patch.object(ExpertLoad, "take", take)


def _correct_each_microbatch(engine: Engine) -> None:
    step, expert_load = engine.forward_backward, engine.expert_load
    if not isinstance(step, SpmdStep) or expert_load is None:
        return
    start, microbatches = step.start_microbatch, itertools.count()

    def start_microbatch(is_last: bool) -> None:
        if next(microbatches):
            expert_load.take()
            expert_load.correct(torch.tensor(False))
        start(is_last)

    step.start_microbatch = start_microbatch


def _factors_of_experts(change: Callable[[Tensor], Tensor]) -> AbstractContextManager:
    """Change the matrices of the experts' adapters where they are multiplied. change: of a stack, on the rank that holds it."""
    original = adapters._expert_factors
    return patch.object(adapters, "_expert_factors", lambda *args: tuple(map(change, original(*args))))


def _has_experts(config: Config, resolved: ResolvedRun) -> bool:
    return resolved.structure.has_experts


def _trains_experts(config: Config, resolved: ResolvedRun) -> bool:
    return any(".experts." in name for name in resolved.trained.names)


def _adapts_experts(config: Config, resolved: ResolvedRun) -> bool:
    return any(".experts." in name for name in resolved.trained.shapes)


def _gradients_of_table_summed_twice() -> AbstractContextManager:
    original = PipelineStep._sum_gradients_of_table

    def twice(step: PipelineStep) -> None:
        original(step)
        original(step)

    return patch.object(PipelineStep, "_sum_gradients_of_table", twice)


def _future_of_a_part() -> AbstractContextManager:
    def shifted_in_parts(batch: Batch, depth: int) -> Batch:
        fields = [[None] * 4 if x is None or x.dim() < 2 else x.chunk(4, 1) for x in batch]
        parts = [with_future(Batch(*columns), depth) for columns in zip(*fields, strict=True)]
        labels, future = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("labels", "future"))
        return batch._replace(labels=labels, future=future)

    return patch.object(steps, "with_future", shifted_in_parts)


def _has_boundaries(config: Config, resolved: ResolvedRun) -> bool:
    return config.data.dataset == "chat"  # other samples may be one document each


def _is_recurrent_with_boundaries(config: Config, resolved: ResolvedRun) -> bool:
    return _is_recurrent(config, resolved) and _has_boundaries(config, resolved)


def _is_recurrent(config: Config, resolved: ResolvedRun) -> bool:
    return resolved.structure.is_recurrent


def _has_balance_loss(config: Config, resolved: ResolvedRun) -> bool:
    return resolved.structure.has_experts and config.experts.balance_loss > 0


def _has_corrections(config: Config, resolved: ResolvedRun) -> bool:
    return resolved.structure.has_experts and config.experts.bias_rate > 0


def _is_quantized(config: Config, resolved: ResolvedRun) -> bool:
    return bool(resolved.parameter_storage.quantized)


def _scales_cast() -> AbstractContextManager:
    """Round scales as FSDP rounds floating-point parameters when it gathers them in bf16."""
    original = nf4._scales
    return patch.object(nf4, "_scales", lambda parts: original(parts).bfloat16().float())


def _shifted_rows() -> AbstractContextManager:
    """Read the rows of quantized weights in the order (last, first, second ...)."""
    original = nf4.QuantizedWeight.fill
    return patch.object(
        nf4.QuantizedWeight, "fill", lambda weight, read: original(weight, lambda region: read(region).roll(1, -2))
    )


def _shards_as_matrices() -> AbstractContextManager:
    def matrices_of(target: Tensor, sharding: Sharding) -> list[Matrix]:
        shards = [None] if target.dim() == 2 else range(len(target))
        rows, columns = target.shape[-2:]
        held = {sharding.rank: (slice(0, rows), slice(0, columns))} if rows * columns else {}
        return [Matrix(target, index, (rows, columns), held) for index in shards]

    return patch.object(muon, "matrices_of", matrices_of)


def _z_loss_of_a_shard() -> AbstractContextManager:
    """Compute the z-loss from the vocabulary rows of one rank."""
    original = cross_entropy._losses_and_gradient

    def wrong(
        hidden: Tensor, weight: Tensor, labels: Tensor, first_row: int, group: ProcessGroup | None, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        *options, z_loss = rest
        losses, margins, _, gradient = original(hidden, weight, labels, first_row, group, *options, 0.0)
        # With any target, because the gradient of the cross-entropy is subtracted again.
        own = hidden, weight, labels.clamp(max=0), 0, None
        _, _, squares, of_both = original(*own, *options, z_loss)
        _, _, _, of_loss = original(*own, *options, 0.0)
        return losses, margins, squares, None if gradient is None else gradient + of_both - of_loss

    return patch.object(cross_entropy, "_losses_and_gradient", wrong)


BUGS = {
    "gradients averaged instead of summed": Bug(("dp_shard=2", "cp=2"), _averaged),
    "gradients of head norms not summed over tp": Bug(
        ("tp=2",),
        _head_norms_not_reduced,
        applies=lambda config, resolved: (
            any("q_norm" in name for name in resolved.trained.fully)
            and "head_norm" in tensor_styles(meta_model(resolved.spec.model, resolved.sizes)).values()
        ),
        parameters="attention.",
    ),
    "gradients of replicated norms counted tp times": Bug(
        ("tp=2",),
        lambda: _after_init(Engine, partial(_count_twice, part="attention_norm.weight")),
        applies=lambda config, resolved: any("attention_norm" in name for name in resolved.trained.fully),
        parameters="attention_norm",
    ),
    "gradients of replicated adapter matrices not summed over tp": Bug(
        ("tp=2",),
        lambda: patch.object(adapters, "local_factor", to_local),
        applies=lambda config, resolved: config.lora.rank is not None,
        parameters="lora_",
    ),
    "losses averaged per microbatch": Bug(
        ("dp_shard=1",),
        _averaged_per_microbatch,
        applies=lambda config, resolved: config.data.dataset in CHAT_DATASETS,
        microbatches=2,
    ),
    "answers not summed over cp": Bug(
        ("cp=2",),
        lambda: patch.object(preference, "_sum_over", lambda own, group: own),
        applies=lambda config, resolved: config.preference.enabled,
    ),
    "neighbouring values rotated as halves": Bug(
        ("dp_shard=1",),
        lambda: patch.object(llama, "rotate_pairs", rotate_halves),
        applies=lambda config, resolved: resolved.spec.huggingface.is_paired,
        needs_transformers=True,
    ),
    "documents visible to each other under cp": Bug(
        ("cp=2 data.document_mask=true",),
        lambda: _after_init(Mask, lambda mask: setattr(mask, "by_document", False)),
        applies=_has_boundaries,
        leaks=True,
    ),
    "window off by one under cp": Bug(
        ("cp=2 data.document_mask=false",),
        lambda: _after_init(Mask, lambda mask: setattr(mask, "window", mask.window and mask.window + 1)),
        applies=lambda config, resolved: any(
            kind.reach(config.training.seq_len) < config.training.seq_len - 1
            for kind in resolved.structure.kinds.values()
        ),
        leaks=True,
    ),
    "gradients of a shared table summed twice": Bug(
        ("pp=2",),
        _gradients_of_table_summed_twice,
        applies=lambda config, resolved: (
            bool(resolved.structure.table) and "tok_embeddings.weight" in resolved.trained.fully
        ),
        parameters="tok_embeddings",
    ),
    "state of a recurrence crosses documents": Bug(
        ("dp_shard=1 data.document_mask=true",),
        recurrence_bugs.state_not_reset,
        applies=_is_recurrent_with_boundaries,
        leaks=True,
    ),
    "convolution reads other documents": Bug(
        ("dp_shard=1 data.document_mask=true",),
        recurrence_bugs.convolution_across_documents,
        applies=_is_recurrent_with_boundaries,
        leaks=True,
    ),
    "convolution begins with zeros in each part of a sequence": Bug(
        ("cp=2",), recurrence_bugs.convolution_without_halo, applies=_is_recurrent
    ),
    "state before a part of a sequence is zero": Bug(
        ("cp=2",), recurrence_bugs.state_of_a_part_not_continued, applies=_is_recurrent
    ),
    "state before a part of a sequence has no gradient": Bug(
        ("cp=2",), recurrence_bugs.gradient_of_the_state_dropped, applies=_is_recurrent
    ),
    "maps of chunks composed in the wrong order": Bug(
        ("cp=2",), recurrence_bugs.maps_composed_in_the_wrong_order, applies=_is_recurrent
    ),
    "decay missing in a factor": Bug(("dp_shard=1",), recurrence_bugs.decay_missing_in_a_factor, applies=_is_recurrent),
    "norm of a recurrence's result over all heads": Bug(
        ("tp=2", "dp_shard=1"), recurrence_bugs.norm_of_all_heads, applies=_is_recurrent
    ),
    "gradients of routers not summed over tp": Bug(
        ("tp=2",),
        lambda: patch.object(experts, "Partial", Replicate),
        applies=lambda config, resolved: any("router" in name for name in resolved.trained.fully),
        parameters="router",
    ),
    "gradients of experts counted ep times": Bug(
        ("dp_shard=2 ep=2",),
        lambda: _after_init(Engine, partial(_count_twice, part=".experts.")),
        applies=_trains_experts,
        parameters="experts.",
    ),
    "rows sent to experts without a gradient": Bug(("dp_shard=2 ep=2",), _rows_detached, applies=_has_experts),
    "gradients of a sequence's parts not gathered over tp": Bug(
        ("tp=2 ep=2 sequence_parallel=false",),
        lambda: patch.object(experts, "_forward_on_own_tokens", _sliced_sequence),
        applies=_has_experts,
    ),
    "gradient norm without experts": Bug(
        ("tp=2 ep=2",),
        lambda: _after_init(Engine, partial(_weight_of_experts_in_norm, factor=0.0)),
        applies=_trains_experts,
    ),
    "gradient norm of experts averaged over ep": Bug(
        ("dp_shard=2 ep=2",),
        lambda: _after_init(Engine, partial(_weight_of_experts_in_norm, factor=0.5)),
        applies=_trains_experts,
    ),
    "adapters of experts added to the rows of other experts": Bug(
        ("dp_shard=2 ep=2",),
        lambda: _factors_of_experts(lambda stack: stack.roll(1, 0)),
        applies=_adapts_experts,
        parameters="lora_",
    ),
    "adapters of experts shared by the experts of a rank": Bug(
        ("dp_shard=2 ep=2",),
        lambda: _factors_of_experts(lambda stack: stack[:1].expand_as(stack).contiguous()),
        applies=_adapts_experts,
        parameters="lora_",
    ),
    "adapters of experts without a gradient": Bug(
        ("dp_shard=2 ep=2",),
        lambda: _factors_of_experts(lambda stack: stack.detach() + 0 * stack),
        applies=_adapts_experts,
        parameters="experts.",
    ),
    "shards orthogonalized instead of matrices": Bug(
        ("dp_shard=2", "tp=2"), _shards_as_matrices, applies=lambda config, resolved: config.optimizer.name == "muon"
    ),
    "future tokens of a part of a sequence": Bug(
        ("cp=2",), _future_of_a_part, applies=lambda config, resolved: config.training.prediction_weight > 0
    ),
    "z-loss of a part of the vocabulary": Bug(
        ("tp=2",), _z_loss_of_a_shard, applies=lambda config, resolved: config.training.z_loss > 0
    ),
    "scales of quantized weights cast to bf16": Bug(
        ("dp_shard=2", "tp=2"), _scales_cast, applies=lambda config, resolved: resolved.parameter_storage.is_double
    ),
    "codes of quantized weights cut at a wrong row": Bug(("dp_shard=2", "tp=2"), _shifted_rows, applies=_is_quantized),
    "float8 scales that are no powers of two": Bug(
        ("tp=2", "dp_shard=2"),
        lambda: patch.object(float8, "power_of_two", lambda x: x),
        applies=lambda config, resolved: config.training.float8 != "none",
    ),
    "balance loss without a gradient": Bug(("dp_shard=2",), _losses_detached, applies=_has_balance_loss),
    "balance loss not divided by the number of microbatches": Bug(
        ("dp_shard=2",),
        _divided_by_one_microbatch,
        applies=_has_balance_loss,
        microbatches=2,
    ),
    "balance loss of a rank's part of a sequence": Bug(
        ("cp=2", "tp=2"),
        lambda: _after_init(Balance, lambda module: module.groups.clear()),
        applies=_has_balance_loss,
    ),
    "load of experts not summed over ranks": Bug(("tp=2 ep=2",), _load_of_one_rank, applies=_has_corrections),
    "corrections changed in every microbatch": Bug(
        ("dp_shard=2",),
        lambda: _after_init(Engine, _correct_each_microbatch),
        applies=_has_corrections,
        microbatches=2,
    ),
}
"""Name of a bug -> the bug."""
