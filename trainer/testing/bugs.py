"""Published bugs, injected into a run as negative controls of scripts/parity.py and scripts/leak_probe.py."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from models import llama
from models.rope import rotate_halves
from models.spec import meta_model, tensor_styles
from trainer.adapters import apply as adapters
from trainer.batch import Batch
from trainer.config import Config
from trainer.data.prepare.encode import CHAT_DATASETS
from trainer.engine import Engine
from trainer.objective import preference
from trainer.parallel import tensor
from trainer.parallel.attention import Mask
from trainer.parallel.step import SpmdStep
from trainer.run.resolve import ResolvedRun
from trainer.runtime.dtensor import to_local


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


def _count_twice(engine: Engine) -> None:
    step = engine.forward_backward
    original = step._forward_backward

    def forward_backward(*args: Any) -> Sequence[Tensor]:
        results = original(*args)
        for name, parameter in engine.parameters.items():
            if name.endswith("attention_norm.weight"):
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
        lambda: _after_init(Engine, _count_twice),
        applies=lambda config, resolved: any("attention_norm" in name for name in resolved.trained.fully),
        parameters="attention_norm",
    ),
    "gradients of replicated adapter matrices not summed over tp": Bug(
        ("tp=2",),
        lambda: patch.object(adapters, "_local_factor", to_local),
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
        applies=lambda config, resolved: config.data.dataset == "chat",  # other samples may have no boundary
        leaks=True,
    ),
    "window off by one under cp": Bug(
        ("cp=2 data.document_mask=false",),
        lambda: _after_init(Mask, lambda mask: setattr(mask, "window", mask.window and mask.window + 1)),
        applies=lambda config, resolved: any(
            kind.has_window(config.training.seq_len) for kind in resolved.plan.kinds.values()
        ),
        leaks=True,
    ),
}
"""Name of a bug -> the bug."""
