"""Allocation and initial values of a model that was parallelized on the meta device."""

import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Generator, Tensor, nn

from models.moe import is_stack
from models.spec import saved_buffers
from models.width import WIDTH_ROLES, width_role
from trainer.adapters.select import LORA_A, LORA_B, init_adapter
from trainer.base.config import LoraConfig
from trainer.parallel.tensor import kept_ties
from trainer.runtime.dtensor import local_region

ROWS_PER_SEED = 1024
"""Number of parameter rows that one generator draws. A different number changes the initial weights."""


def allocate(model: nn.Module, device: torch.device, buffer_device: torch.device | None = None) -> None:
    """Allocate all weights of a model on the meta device. Their values are undefined.

    Args:
        model: On the meta device.
        device: Of the parameters.
        buffer_device: Of the buffers, which FSDP does not offload. None: that of the parameters.
    """
    with kept_ties(model):
        model.to_empty(device=device)
    for name, buffer in saved_buffers(model).items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.empty_like(buffer, device=buffer_device or device))


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    loaded: Collection[str] = (),
    lora: LoraConfig | None = None,
    width_ratio: float = 1.0,
) -> None:
    """Draw the initial values of the parameters, and set those of the buffers.

    Args:
        model: Its weights are allocated.
        seed: Seed of the run.
        loaded: Names of the weights that keep their values, because they are loaded.
        lora: Settings of the adapters, if the model has adapters.
        width_ratio: Width at which rates were tuned, divided by that of the model.

    Each group of ROWS_PER_SEED rows of a matrix has its own CPU generator, seeded by (seed, name, group). So a rank draws only
    the groups of its shard, and the weights do not depend on the layout, the world size or the device. In a stack, the
    seed also contains the index of the expert.
    """
    for name, buffer in saved_buffers(model).items():
        owner, _, leaf = name.rpartition(".")
        if name not in loaded:
            buffer.fill_(model.get_submodule(owner).BUFFERS[leaf])
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, parameter in model.named_parameters():
            if name in loaded or not parameter.is_floating_point():  # parts of quantized weights are loaded too
                continue
            local, region = local_region(parameter)
            if local.numel() == 0:
                continue
            stacked = is_stack(model, name)
            matrices = zip(range(region[0].start, region[0].stop), local, strict=True) if stacked else [(None, local)]
            rows, *columns = region[1:] if stacked else region
            shape = parameter.shape[1:] if stacked else parameter.shape
            groups = range(rows.start // ROWS_PER_SEED, -(-rows.stop // ROWS_PER_SEED))
            for expert, matrix in matrices:
                path = f"{seed}/{name}" if expert is None else f"{seed}/{name}/{expert}"
                draws = pool.map(partial(_draw, model, lora, width_ratio, path, name, tuple(shape)), groups)
                for group, drawn in zip(groups, draws, strict=True):
                    first_row = group * ROWS_PER_SEED
                    start, stop = max(first_row, rows.start), min(first_row + ROWS_PER_SEED, rows.stop)
                    own = drawn[(slice(start - first_row, stop - first_row), *columns)]
                    matrix[start - rows.start : stop - rows.start].copy_(own)


def _draw(
    model: nn.Module,
    lora: LoraConfig | None,
    width_ratio: float,
    path: str,
    name: str,
    shape: tuple[int, ...],
    group: int,
) -> Tensor:
    """Return the initial values of one group of rows of a full matrix or vector, as an fp32 tensor on the CPU.

    Args:
        width_ratio: See `initialize`.
        path: Of the matrix, with the seed of the run.
        group: Index of the rows.
    """
    digest = hashlib.blake2b(f"{path}/{group}".encode(), digest_size=8).digest()
    generator = Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    rows = torch.empty(min(ROWS_PER_SEED, shape[0] - group * ROWS_PER_SEED), *shape[1:])
    with torch.no_grad():  # each thread has its own grad mode
        if name.endswith((LORA_A, LORA_B)):
            init_adapter(lora, name, rows, generator)
        else:
            model.init_parameter(name, rows, generator)
            rows *= width_ratio ** WIDTH_ROLES[width_role(model, name)]
    return rows
