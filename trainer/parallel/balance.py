"""Balance of the experts' load: losses of the routers, and statistics of a step.

A loss is computed for each layer and sample over the sample's own tokens, so it depends neither on the layout nor on the other
samples of a batch. Only the numbers of assignments are summed over ranks: they have no gradient, and the rest of a loss is a sum
over tokens. Each layer attaches its losses where they arise, because a pipeline stage passes only the hidden state to the next.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.context import Context
from models.mixture_sizes import MixtureSizes
from models.moe import MixtureOfExperts, Routing
from trainer.base.config import ExpertsConfig
from trainer.parallel.activation_checkpoint import in_backward
from trainer.parallel.mesh import Meshes
from trainer.runtime.distributed import sum_over


class Balance(nn.Module):
    """Attaches the losses of one layer's router, and counts the assignments of tokens to its experts."""

    def __init__(self, config: ExpertsConfig, meshes: Meshes, n_experts: int, device: torch.device):
        """Read the settings.

        Args:
            config: Coefficients of the losses.
            meshes: The device meshes.
            n_experts: Number of the layer's experts.
            device: Of the statistics.
        """
        super().__init__()
        self.balance_loss, self.z_loss = config.balance_loss, config.z_loss
        self.num_samples = torch.ones((), device=device)
        """Number of samples in the step, by which the losses are divided, a scalar. A number would be a constant of the compiled
        block, which each batch size would compile again."""
        tp, cp = meshes.model["tp"], meshes.data["cp"]
        self.tp_rank, self.tp_ranks = tp.get_local_rank(), tp.size()
        self.groups = [axis.get_group() for axis in (tp, cp) if axis.size() > 1]
        """Groups of ranks that have different tokens of the same samples."""
        self.totals = torch.zeros(n_experts + 2, dtype=torch.float64, device=device)
        """Sums over this rank's part of the step: number of valid tokens sent to each expert, balance loss and z-loss of the
        samples, (experts + 2,). Numbers of tokens are exact in fp64."""

    def forward(self, routing: Routing, context: Context) -> Tensor:
        """Return the weights, from whose gradient the losses' backward starts."""
        if not torch.is_grad_enabled():
            return routing.weights
        valid = (context.documents >= 0).chunk(self.tp_ranks, 1)[self.tp_rank]  # (batch, seq)
        experts = routing.experts.flatten(1)  # (batch, seq * experts per token)
        counts = experts.new_zeros(len(valid), routing.scores.shape[-1])
        counts.scatter_add_(1, experts, valid[..., None].expand_as(routing.experts).flatten(1).long())
        losses = self._losses(routing, valid, counts)  # (2,)
        coefficients = losses.new_tensor([self.balance_loss, self.z_loss]) / self.num_samples
        statistics = torch.cat([counts.sum(0).double(), losses.detach().double()])
        if not routing.weights.requires_grad:  # of a layer before all trained parameters, which has no backward
            if not (torch.compiler.is_compiling() or in_backward()):
                self.totals.add_(statistics)
            return routing.weights
        return _Attach.apply(routing.weights, losses @ coefficients, self.totals, statistics)

    def _losses(self, routing: Routing, valid: Tensor, counts: Tensor) -> Tensor:
        """Return this rank's part of the balance loss and of the z-loss, each summed over the samples, (2,).

        The balance loss of a sample of T tokens is E / (k T^2) sum_e c_e sum_t p_te, where c_e of its k T assignments are to
        expert e of E (Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961). It is 1 if the load is balanced. The z-loss is
        the mean of the squared logsumexp of a token's logits (Zoph et al. 2022, "ST-MoE", arXiv:2202.08906).

        Args:
            valid: Whether a token belongs to a document, (batch, seq).
            counts: This rank's assignments to each expert, (batch, experts), int64.
        """
        zero = routing.scores.new_zeros(())
        if not self.balance_loss and not self.z_loss:
            return torch.stack([zero, zero])
        packed = torch.cat([counts, valid.sum(1, keepdim=True)], 1)
        for group in self.groups:
            packed = sum_over(packed, group)
        all_counts, num_tokens = packed[:, :-1].float(), packed[:, -1].clamp(min=1).float()
        balance = z = zero
        if self.balance_loss:
            experts, per_token = routing.scores.shape[-1], routing.experts.shape[-1]
            scores = (routing.scores * valid[..., None]).sum(1)  # (batch, experts)
            balance = ((all_counts * scores).sum(1) / num_tokens.square()).sum() * (experts / per_token)
        if self.z_loss:
            squares = routing.logits.logsumexp(-1).square() * valid  # (batch, seq)
            z = (squares.sum(1) / num_tokens).sum()
        return torch.stack([balance, z])


class _Attach(torch.autograd.Function):
    """The weights, unchanged. Their backward also starts that of the loss, and counts a microbatch once: an evaluation has no
    backward, a recomputed forward has one, and zero-bubble schedules run it twice.

    The totals change in place, because the compiler traces no change of a module's attribute inside a recomputed block."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, totals: Tensor, statistics: Tensor) -> Tensor:
        ctx.save_for_backward(statistics)
        ctx.totals = totals  # not saved for backward: that of another microbatch may change them before
        ctx.is_counted = False
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if not ctx.is_counted:
            ctx.totals.add_(*ctx.saved_tensors)
            ctx.is_counted = True
        return gradient, gradient.new_ones((), dtype=torch.float32), None, None


def apply_balance(model: nn.Module, config: ExpertsConfig, meshes: Meshes, device: torch.device) -> None:
    """Give each mixture of experts its losses and statistics, in place. See Balance for the arguments."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.balance = Balance(config, meshes, module.n_experts, device)


class ExpertLoad:
    """The load of all experts in a step, and the corrections that follow from it."""

    def __init__(self, blocks: Iterable[nn.Module], sizes: MixtureSizes, config: ExpertsConfig, device: torch.device):
        """Find the layers.

        Args:
            blocks: Container of the blocks of each stage of this rank. A block is named by its index.
            sizes: Of the model.
            config: Change of the corrections.
            device: Of the statistics.
        """
        self.bias_rate, self.center_bias = config.bias_rate, config.center_bias
        layers = [i for i in (*range(sizes.n_layers), *sizes.predictions) if sizes.is_sparse(i)]
        self.rows = {layer: row for row, layer in enumerate(layers)}
        self.layers: dict[int, MixtureOfExperts] = {}
        """Index of a layer of this rank -> its mixture of experts."""
        for name, block in (named for container in blocks for named in container.named_children()):
            mixtures = [module for module in block.modules() if isinstance(module, MixtureOfExperts)]
            assert len(mixtures) <= 1, f"block {name} has several mixtures of experts, whose loads would be one"
            self.layers |= {int(name): mixture for mixture in mixtures}
        self.num_samples = 1
        """Number of samples in the step."""
        self.shape, self.device = (len(layers), sizes.n_experts), device
        self.counts = torch.zeros(self.shape, dtype=torch.float64, device=device)
        """Number of valid tokens sent to each expert in the last step, over all ranks, (layers, experts). Exact in fp64."""

    def start_step(self, num_samples: int) -> None:
        """Set the number of samples in the step."""
        self.num_samples = num_samples
        for mixture in self.layers.values():
            mixture.balance.num_samples.fill_(num_samples)

    def take(self) -> dict[str, Tensor]:
        """Return metrics of the step by name, over all ranks.

        balance_loss, router_z_loss: Means over samples and layers.
        All are about the layers that have counted: a compiled one before all trained parameters does not.

        expert_load_violation: Load of a layer's busiest expert, relative to the mean load, minus 1; mean over layers.
        expert_load_violation_max: Largest of the layers.
        expert_load_entropy: Entropy of a layer's load, relative to that of an even load; mean over layers.
        idle_experts: Share of all experts without a token.
        """
        packed = torch.zeros(self.shape[0], self.shape[1] + 2, dtype=torch.float64, device=self.device)
        for layer, mixture in self.layers.items():
            packed[self.rows[layer]] = mixture.balance.totals
            mixture.balance.totals.zero_()
        packed = sum_over(packed, dist.group.WORLD)
        counts = self.counts = packed[:, :-2]
        has_counted = (counts.sum(1) > 0).double()

        def mean(values: Tensor) -> Tensor:
            return has_counted @ values / has_counted.sum().clamp(min=1)

        losses = mean(packed[:, -2:]) / self.num_samples
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)  # (layers, experts)
        violation = shares.amax(1) * self.shape[1] - 1
        entropy = -torch.special.xlogy(shares, shares).sum(1) / math.log(max(2, self.shape[1]))
        return {
            "balance_loss": losses[0],
            "router_z_loss": losses[1],
            "expert_load_violation": mean(violation),
            "expert_load_violation_max": violation.amax().clamp(min=0),
            "expert_load_entropy": mean(entropy),
            "idle_experts": mean((counts == 0).double().mean(1)),
        }

    @torch.no_grad()
    def correct(self, skip: Tensor) -> None:
        """Change the corrections of this rank's routers by the load of the last step, so that experts with less than the mean
        load are chosen more often (Wang et al. 2024, arXiv:2408.15664). skip: a scalar; if true, nothing changes."""
        if not self.bias_rate:
            return
        for layer, mixture in self.layers.items():
            counts, correction = self.counts[self.rows[layer]], mixture.router.correction
            change = (counts.sum() - counts * len(counts)).sign()  # the mean need not be representable
            if self.center_bias:
                change = change - change.mean()
            correction += (change * self.bias_rate * ~skip.to(change.device)).to(correction)
