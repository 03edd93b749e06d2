"""Published gradient bugs, injected into a run as negative controls of scripts/parity.py."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from models import llama
from models.rope import rotate_halves
from trainer.batch import IGNORE_INDEX, Batch
from trainer.config import Config
from trainer.engine import Engine
from trainer.parallel import tensor
from trainer.parallel.attention import Mask
from trainer.parallel.step import SpmdStep
from trainer.run.resolve import ResolvedRun


@dataclass(frozen=True)
class Bug:
    layouts: tuple[str, ...]
    """Layouts in which the bug shows. The first that fits a configuration is used."""
    inject: Callable[[], AbstractContextManager]
    applies: Callable[[Config, ResolvedRun], bool] = lambda config, resolved: True
    """Function (configuration, resolved run) -> whether the bug can show in a run of this configuration."""
    needs_transformers: bool = False
    """Whether the bug shows only in a comparison with transformers, because it affects all layouts equally."""
    parameters: str = ""
    """Part of the names of the parameters whose gradients are wrong; empty: all."""


def _averaged() -> AbstractContextManager:
    original = FSDPModule.set_gradient_divide_factor
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda module, factor: original(module, 2.0))


def _head_norms_not_reduced() -> AbstractContextManager:
    """Treat each rank's heads as replicated, so that no reduction follows."""
    original = tensor.styles
    wrong = {"head_norm": tensor._Norm(Replicate())}
    return patch.object(tensor, "styles", lambda *args, **kwargs: original(*args, **kwargs) | wrong)


def _counted_twice() -> AbstractContextManager:
    original = Engine.__init__

    def init(engine: Engine, *args: Any) -> None:
        original(engine, *args)
        for name, parameter in engine.parameters.items():
            if name.endswith("attention_norm.weight"):
                parameter.register_hook(lambda gradient: gradient * 2)

    return patch.object(Engine, "__init__", init)


@contextmanager
def _averaged_per_microbatch() -> Iterator[None]:
    call, loss_sum, count, total = SpmdStep.__call__, SpmdStep._loss_sum, [0], [None]

    def counting_call(step: SpmdStep, microbatches: Any, num_targets: Tensor) -> Tensor:
        count[0], total[0] = len(microbatches), num_targets
        return call(step, microbatches, num_targets)

    def averaged(step: SpmdStep, batch: Batch) -> Tensor:
        own = (batch.labels != IGNORE_INDEX).sum().clamp(min=1)
        return loss_sum(step, batch) * total[0] / (own * count[0])

    with patch.object(SpmdStep, "__call__", counting_call), patch.object(SpmdStep, "_loss_sum", averaged):
        yield


def _changed_mask(change: Callable[[Mask], None]) -> AbstractContextManager:
    original = Mask.__init__

    def init(mask: Mask, *args: Any) -> None:
        original(mask, *args)
        change(mask)

    return patch.object(Mask, "__init__", init)


def _visible_documents() -> AbstractContextManager:
    return _changed_mask(lambda mask: setattr(mask, "by_document", False))


def _longer_window() -> AbstractContextManager:
    return _changed_mask(lambda mask: setattr(mask, "window", mask.window and mask.window + 1))


def _has_window(config: Config, resolved: ResolvedRun) -> bool:
    return any(
        (kind.window or config.training.seq_len) < config.training.seq_len for kind in resolved.plan.kinds.values()
    )


BUGS = {
    "gradients averaged instead of summed": Bug(("dp_shard=2", "cp=2"), _averaged),
    "gradients of head norms not summed over tp": Bug(
        ("tp=2",),
        _head_norms_not_reduced,
        lambda config, resolved: "head_norm" in resolved.plan.tensor_block.values(),
        parameters="attention.",
    ),
    "gradients of replicated norms counted tp times": Bug(("tp=2",), _counted_twice, parameters="attention_norm"),
    "losses averaged per microbatch": Bug(
        ("dp_shard=1",),
        _averaged_per_microbatch,
        lambda config, resolved: config.data.dataset == "chat",
    ),
    "neighbouring values rotated as halves": Bug(
        ("dp_shard=1",),
        lambda: patch.object(llama, "rotate_pairs", rotate_halves),
        lambda config, resolved: resolved.spec.huggingface.is_paired,
        needs_transformers=True,
    ),
    "documents visible to each other under cp": Bug(
        ("cp=2 data.document_mask=true",),
        _visible_documents,
        lambda config, resolved: config.data.packing == "best-fit",  # otherwise the first samples may have no boundary
    ),
    "window off by one under cp": Bug(("cp=2",), _longer_window, _has_window),
}
"""Name of a bug -> how it is injected."""
