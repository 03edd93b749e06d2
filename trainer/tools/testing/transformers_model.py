"""The first step of a run, computed by transformers' implementation of the model."""

import os
from collections.abc import Sequence
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models.huggingface_config import write_config
from models.huggingface_tensors import join_tensors, split_tensors
from trainer.base.config.load import load_config
from trainer.base.config.packages import require_package
from trainer.batch import IGNORE_INDEX
from trainer.build import build_trainer
from trainer.run.resolve import resolve
from trainer.runtime.device import DTYPES


def transformers_step(argv: Sequence[str]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the mean loss and z-loss per target token, and the gradients of all parameters, by native name. Run on one rank. The
    initial weights and the batches are those of the Trainer."""
    os.environ["LOG_RANK"] = ""  # the caller prints a table
    config = load_config(argv)
    resolved = resolve(config, dist.get_world_size())
    trainer = build_trainer(config, resolved, torch.device("cpu"), None)
    batches = list(islice(trainer.data.batches(trainer.state), resolved.grad_accum))
    hf, head_dim = resolved.spec.huggingface, resolved.sizes.head_dim
    transformers = require_package("transformers", "")
    values = write_config(hf, resolved.sizes, config.training.seq_len) | {"pad_token_id": None}
    hf_config = transformers.AutoConfig.for_model(**values)
    parameters = {name: p.detach() for name, p in trainer.engine.parameters.items()}
    weights = {name: w.detach() for name, w in trainer.engine.weights.items()}
    model, keys = getattr(transformers, hf.architecture).from_pretrained(
        None,
        config=hf_config,
        state_dict=join_tensors(hf, weights, head_dim),
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    wrong = {kind: names for kind, names in keys.items() if names}
    assert not wrong, wrong
    loss, z_loss = _mean_losses(model.to(DTYPES[config.training.compute_dtype]), batches)
    (loss + config.training.z_loss * z_loss).backward()
    gradients = stored_tensors(model, {name: p.grad.float() for name, p in model.named_parameters()})
    return {"loss": loss.item(), "z_loss": z_loss.item()}, split_tensors(hf, gradients, parameters, head_dim)


def stored_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of transformers' parameters as save_pretrained stores them: those of experts are stacked in memory only.

    Args:
        model: Of transformers.
        tensors: By the names of its parameters.
    """
    stored = require_package("transformers.core_model_loading", "").revert_weight_conversion(model, tensors)
    config = model.config
    for name in [name for name in stored if name.endswith("linear_attn.q_conv1d.weight")]:
        # transformers 5.24 splits joined filters into equal parts, also if keys and values have different widths.
        parts = [name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
        keys, values = (
            getattr(config, f"linear_num_{x}_heads") * getattr(config, f"linear_{x}_head_dim") for x in ("key", "value")
        )
        joined = torch.cat([stored[part] for part in parts])
        stored |= dict(zip(parts, joined.split((keys, keys, values)), strict=True))
    return stored


def _mean_losses(model: nn.Module, batches: Sequence) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the target tokens, and the mean square of the log-sum-exp of their logits."""
    losses = []
    for batch in batches:
        logits = model(batch.tokens, position_ids=batch.positions, use_cache=False).logits.float()
        targets = batch.labels[is_target := batch.labels != IGNORE_INDEX]
        logits = logits[is_target]
        losses.append(torch.stack((F.cross_entropy(logits, targets, reduction="none"), logits.logsumexp(-1).square())))
    return torch.cat(losses, 1).mean(1).unbind()
