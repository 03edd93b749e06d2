"""Application of adapters (trainer/adapters/select.py) to a model, whose matrices may be sharded."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from models.context import Context
from models.moe import Experts
from models.row_groups import grouped_product
from trainer.adapters.nf4 import placed_like
from trainer.adapters.select import LORA_A, LORA_B, TrainedParameters, matrices_of
from trainer.base.config import LoraConfig
from trainer.runtime.device import DTYPES
from trainer.runtime.dtensor import local_factor, to_local


class AdapterDropout:
    """Dropout of the adapters' inputs. The dropped values depend on the seed, the module, the token and the column alone,
    so they do not depend on the layout, and recomputation drops the same values."""

    def __init__(self, probability: float, seed: int):
        self.seed, self.kept = seed, 1 - probability
        self.threshold = int(probability * 2**31)
        self.keys: Tensor | None = None
        """Hash of each token and the current block, (batch, seq / cp), int32."""

    def attach(self, model: nn.Module, blocks: str) -> None:
        """Give the adapters of each block its keys. blocks: name of the container of the blocks."""
        model.register_forward_pre_hook(self._hash_tokens, with_kwargs=True)
        for name, block in model.get_submodule(blocks).named_children():
            block.register_forward_pre_hook(partial(self._hash_block, _key_of(f"{self.seed}/{name}")))
            block.forward = self._with_keys(block.forward)

    def _hash_tokens(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Add a hash of each token to the context. In training, a sample, a document and a position identify a token."""
        given = dict(zip(("context", "head"), args[1:], strict=False)) | kwargs
        context = given.get("context") or Context.of(args[0])
        keys = torch.zeros_like(context.documents, dtype=torch.int32)
        for part in (context.documents, context.samples[:, None], context.positions):
            keys = _mix(keys + part.to(torch.int32))
        return args[:1], given | {"context": context._replace(dropout_keys=keys)}

    @staticmethod
    def _hash_block(key: int, block: nn.Module, args: tuple[Tensor, Context]) -> tuple[Tensor, Context]:
        h, context = args
        return h, context._replace(dropout_keys=_mix(context.dropout_keys ^ key))

    def _with_keys(self, forward: Callable[[Tensor, Context], Tensor]) -> Callable[[Tensor, Context], Tensor]:
        """Return a block's forward that starts with the keys of its context. It belongs inside recomputation, because backward
        may recompute a block after another microbatch has started."""

        def forward_with_keys(h: Tensor, context: Context) -> Tensor:
            self.keys = context.dropout_keys
            return forward(h, context)

        return forward_with_keys

    def __call__(self, x: Tensor, module_key: int, first_column: int, first_token: int = 0) -> Tensor:
        """Return the input of an adapter with some values dropped and the others scaled.

        Args:
            x: (batch, tokens, columns).
            module_key: Hash of the module's name.
            first_column: Index of the first column in the full input.
            first_token: Index of the first token in the sequence of the keys.
        """
        columns = torch.arange(first_column, first_column + x.shape[-1], dtype=torch.int32, device=x.device)
        keys = self.keys[:, first_token : first_token + x.shape[1], None]
        hashes = _mix(keys ^ _mix(columns + module_key))
        return x * ((hashes & 0x7FFFFFFF) >= self.threshold) / self.kept


def _key_of(name: str) -> int:
    return zlib.crc32(name.encode()) >> 1  # a positive int32


def _mix(x: Tensor) -> Tensor:
    """Return a hash of each int32 value (the function lowbias32 of Wellons 2018, "Prospecting for Hash Functions")."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B
    return x ^ (x >> 16 & 0xFFFF)


def apply_lora(model: nn.Module, blocks: str, trained: TrainedParameters, config: LoraConfig, seed: int) -> None:
    """Add the adapters and freeze all parameters that are not trained, in place. Without [lora] rank, do nothing.

    Args:
        model: A pipeline stage, on the meta device. Its matrices may be sharded by tensor parallelism, but its blocks must
            neither recompute nor be compiled yet.
        blocks: Name of the container of the blocks.
        trained: The parameters that the run trains.
        config: Settings of the adapters.
        seed: Seed of the dropout.
    """
    if config.rank is None:
        return
    dtype = DTYPES[config.dtype]
    for name, parameter in model.named_parameters():
        is_trained = name in trained.fully
        parameter.requires_grad_(is_trained)
        if is_trained:
            model.get_submodule(name.rpartition(".")[0]).to(dtype)
    dropout = AdapterDropout(config.dropout, seed) if config.dropout else None
    if dropout is not None:
        dropout.attach(model, blocks)
    present = dict(model.named_modules())
    stacks: dict[Experts, dict[str, list[tuple[int, ...]]]] = {}
    for weight in trained.adapted:
        name, _, leaf = weight.rpartition(".")
        shapes = [trained.shapes[matrix] for matrix in matrices_of(weight)]
        if isinstance(module := present.get(name), Experts):
            stacks.setdefault(module, {})[leaf] = shapes
        elif module is not None:
            # Without the block's name, because compiled blocks share one graph.
            _, _, name_in_block = name.removeprefix(f"{blocks}.").partition(".")
            _add_adapter(module, shapes, name_in_block, config, dropout)
    for experts, shapes_of in stacks.items():
        _add_expert_adapters(experts, shapes_of, config)


def _add_adapter(
    linear: nn.Linear,
    shapes: Sequence[tuple[int, ...]],
    module_name: str,
    config: LoraConfig,
    dropout: AdapterDropout | None,
) -> None:
    """shapes: of the two matrices."""
    weight, base, scale = placed_like(linear, "weight"), linear.forward, config.scale
    for name, shape, dim in zip((LORA_A, LORA_B), shapes, (1, 0), strict=True):
        matrix = torch.empty(shape, dtype=DTYPES[config.dtype], device=weight.device)
        if isinstance(weight, DTensor):
            # The matrix with the sharded dim of the weight is sharded like it. The other one is replicated.
            placement = Shard(dim) if weight.placements[0].is_shard(dim) else Replicate()
            matrix = distribute_tensor(matrix, weight.device_mesh, [placement], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(matrix))
    module_key = _key_of(module_name)
    # A replicated weight multiplies this rank's tokens: some of them, so that its gradients are partial, or all.
    is_replicated = isinstance(weight, DTensor) and weight.placements[0].is_replicate()
    splits_tokens = is_replicated and linear.gradient_placement.is_partial()
    rank = weight.device_mesh.get_local_rank() if isinstance(weight, DTensor) else 0

    def forward(x: Tensor) -> Tensor:
        out = base(x)
        local = to_local if is_replicated and not splits_tokens else local_factor
        hidden, a, b = (local(t) for t in (x, linear.lora_a, linear.lora_b))
        if dropout is not None and torch.is_grad_enabled():  # not in evaluation
            splits_columns = isinstance(x, DTensor) and x.placements[0].is_shard(x.dim() - 1)
            first_column = rank * hidden.shape[-1] if splits_columns else 0
            first_token = rank * hidden.shape[1] if splits_tokens else 0
            hidden = dropout(hidden, module_key, first_column, first_token)
        product = F.linear(F.linear(hidden, a) * scale, b)
        if isinstance(out, DTensor):  # a shard of the result, or a term of its sum over the ranks
            product = DTensor.from_local(product, out.device_mesh, out.placements, run_check=False)
        return out + product

    linear.forward = forward


def _add_expert_adapters(experts: Experts, shapes: Mapping[str, Sequence[tuple[int, ...]]], config: LoraConfig) -> None:
    """Add adapters to the matrices of each expert, on the rank that holds the expert. shapes: name of stacked matrices -> shapes
    of the two stacks of the adapters, of all ranks."""
    for leaf, of_adapter in shapes.items():
        weight = placed_like(experts, leaf)
        for name, shape in zip(matrices_of(leaf), of_adapter, strict=True):
            stack = torch.empty(shape, dtype=DTYPES[config.dtype], device=weight.device)
            if isinstance(weight, DTensor):
                stack = distribute_tensor(stack, weight.device_mesh, weight.placements, src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(stack))
    base, scale = experts.product, config.scale

    def product(name: str, rows: Tensor, counts: Tensor, biases: Tensor | None = None) -> Tensor:
        out = base(name, rows, counts, biases)
        if name not in shapes:
            return out
        a, b = _expert_factors(experts, name)
        return out + grouped_product(grouped_product(rows, a, counts) * scale, b, counts)

    experts.product = product


def _expert_factors(experts: Experts, leaf: str) -> tuple[Tensor, Tensor]:
    """Return the stacked matrices of the adapters of this rank's experts, inside their forward."""
    a, b = matrices_of(leaf)
    return getattr(experts, a), getattr(experts, b)
