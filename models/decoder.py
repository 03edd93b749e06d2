"""The decoder that all model families share, and its initial weights.

Plain torch on one device: parallelism, precision, checkpointing and export are applied from outside, by module name.
Names are Meta's: tok_embeddings, layers.N.attention.wq, layers.N.feed_forward.w1, norm, output.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from models.attention import Attention
from models.blocks import PredictionBlock, PreNormBlock
from models.components import FeedForward, Norm, OffsetRMSNorm, Output
from models.context import Context
from models.moe import MixtureOfExperts
from models.sizes import Sizes
from models.spec import Head, LayerKind, Structure, is_bias, multiply_adds


class Decoder(nn.Module):
    """A transformer decoder: embedding, blocks, norm and output projection."""

    TENSOR: ClassVar = {"tok_embeddings": "embedding", "norm": "norm", "output": "output"}

    def __init__(
        self,
        sizes: Sizes,
        norm: Norm,
        block: Callable[[int, LayerKind], nn.Module],
        embedding: nn.Embedding | None = None,
        output: Output | None = None,
    ):
        """Build the model.

        Args:
            norm: Function that builds the last norm.
            block: Function (index, kind) that builds a layer.
            embedding: None: built from the sizes.
            output: None: built from the sizes.
        """
        super().__init__()
        self.sizes = sizes
        # Layers for multi-token prediction attend to all earlier tokens, in all families.
        self.layer_kinds = (*sizes.layer_kinds, *("full" for _ in sizes.predictions))
        kinds = sizes.kinds()
        self.kinds = {name: kinds[name] for name in dict.fromkeys(self.layer_kinds)}
        self.masks = nn.ModuleDict({name: kind.mask() for name, kind in self.kinds.items()})
        self.tok_embeddings = embedding or nn.Embedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleDict({str(i): block(i, kinds[name]) for i, name in enumerate(self.layer_kinds)})
        self.norm = norm(sizes.dim)
        self.output = output or Output(sizes.dim, sizes.vocab_size)
        if sizes.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, context: Context | None = None, head: Head | None = None) -> Tensor:
        """See models.spec.Model."""
        context = Context.of(tokens) if context is None else context
        names = {index: self.layer_kinds[int(index)] for index in self.layers}  # kinds of this pipeline stage's layers
        contexts = {name: self._context_of_kind(name, context) for name in dict.fromkeys(names.values())}
        # The last stage of a pipeline gets a hidden state, and may have the embedding for its predictions.
        is_embedded = tokens.is_floating_point() and isinstance(self.tok_embeddings, nn.Embedding)
        h = tokens if is_embedded else self.tok_embeddings(tokens)  # (batch, seq, dim)
        for index, layer in self.layers.items():
            if int(index) < self.sizes.n_layers:
                h = layer(h, contexts[names[index]])
        h = self.norm(h)
        if context.future is not None:
            h = self._with_predictions(h, context.future, contexts)
        return self.output(h, head)

    def _with_predictions(self, h: Tensor, future: Tensor, contexts: Mapping[str, Context]) -> Tensor:
        """Return the hidden states that predict the next token, h, and those of each layer for multi-token prediction, one after
        the other along the batch dim. future: see Context."""
        states = [h]
        for index, layer in self.layers.items():
            if (depth := int(index) - self.sizes.n_layers) >= 0:
                tokens, context = future[..., depth], contexts[self.layer_kinds[int(index)]]
                # What follows a document is no token whose expert counts.
                context = context._replace(documents=context.documents.where(tokens >= 0, -1))
                embedding = self.tok_embeddings(tokens.clamp(min=0))
                states.append(layer(torch.cat((embedding, states[-1]), -1), context))
        return torch.cat(states) if len(states) > 1 else h  # ((1 + layers) batch, seq, dim)

    def _context_of_kind(self, name: str, context: Context) -> Context:
        rope = self.kinds[name].rope
        angles = None if rope is None else rope(context.positions)
        mask = self.masks[name](context)  # it has read last_readers, so that compiled blocks need not know them
        return context._replace(rope=angles, mask=mask, last_readers=None, future=None)

    def init_parameter(self, name: str, rows: Tensor, generator: Generator) -> None:
        """See models.spec.Model. Matrices are drawn from a normal distribution with variance 1 / (number of inputs)
        (LeCun et al. 1998, "Efficient BackProp"). The variance of the embedding table is 1 / dim, because the table may also be
        the output weight. Matrices whose products are added to the residual stream (INTO_RESIDUAL) are divided by
        sqrt(2 n_layers) (Radford et al. 2019, GPT-2). Norms start as multiplications by one, biases at zero. A module draws the
        parameters that it names in INITIAL itself."""
        owner, _, leaf = name.rpartition(".")
        module = self.get_submodule(owner)
        if (draw := getattr(module, "INITIAL", {}).get(leaf)) is not None:
            draw(rows, generator)
        elif isinstance(module, nn.RMSNorm):
            rows.fill_(0.0 if isinstance(module, OffsetRMSNorm) else 1.0)
        elif is_bias(self, name):
            rows.zero_()
        else:
            std = rows.shape[-1] ** -0.5
            if self._is_into_residual(name):
                std /= math.sqrt(2 * self.sizes.n_layers)
            rows.normal_(0.0, std, generator=generator)

    def _is_into_residual(self, name: str) -> bool:
        """Return whether the module that contains a matrix, or one that contains this module, names it in INTO_RESIDUAL."""
        path = name.removesuffix(".weight").split(".")
        owners = ((self.get_submodule(".".join(path[:i])), ".".join(path[i:])) for i in range(len(path)))
        return any(inner in getattr(module, "INTO_RESIDUAL", ()) for module, inner in owners)

    def flops_per_token(self, seq_len: int) -> int:
        """See models.spec.Model. A multiply-add is two operations. Backward costs twice as much as forward.

        The count includes every linear layer (also the output projection), the experts that a token is sent to, and the
        kernels of the mixers. In attention, a token attends to (seq_len + 1) / 2 keys on average, and to at most the window's
        keys. Norms, activations and recomputation are not counted.
        """
        linear = sum(multiply_adds(self).values())
        mixers = sum(self.kinds[name].multiply_adds(seq_len) for name in self.layer_kinds) // seq_len
        outputs = len(self.sizes.predictions) * self.output.weight.numel()  # beside the first one
        return 3 * 2 * (linear + mixers + outputs)

    def structure(self) -> Structure:
        """See models.spec.Model."""
        tied = self.output.weight is self.tok_embeddings.weight
        predictions = len(self.sizes.predictions)
        joined = tied or predictions > 0
        divisible = [size for kind in self.kinds.values() for size in kind.HEADS]
        if any(isinstance(layer.feed_forward, FeedForward) for layer in self.layers.values()):
            divisible.append("hidden_dim")
        if any(m.shared is not None for m in self.modules() if isinstance(m, MixtureOfExperts)):
            divisible.append("shared_dim")
        return Structure(
            blocks_path="layers",
            pre_blocks=("tok_embeddings",),
            post_blocks=("norm", "output"),
            # With tied embeddings, the embedding and the output share a parameter, so both must be in one unit. Multi-token
            # prediction uses the embedding again before the output.
            fsdp_units=(("tok_embeddings", "norm", "output"),) if joined else (("tok_embeddings",), ("norm", "output")),
            num_predictions=predictions,
            tied=("tok_embeddings", "output") if tied else (),
            tensor=self.TENSOR,
            tp_divisible=tuple(dict.fromkeys(divisible)),
            has_experts=any(isinstance(m, MixtureOfExperts) for m in self.modules()),
            masks="masks",
            kinds=self.kinds,
            layer_kinds=self.layer_kinds,
        )


def pre_norm_decoder(
    sizes: Sizes,
    mixer: Callable[[LayerKind], nn.Module] | None = None,
    feed_forward: Callable[[int], nn.Module] | None = None,
    norm_class: type[nn.RMSNorm] = nn.RMSNorm,
) -> Decoder:
    """Return a decoder of pre-norm blocks.

    Args:
        mixer: Function (kind) that builds the mixer of a layer. None: Attention without norms of queries and keys.
        feed_forward: Function (index) that builds the feed-forward layer. None: FeedForward.
        norm_class: Class of the norms outside the mixers.
    """
    norm = partial(norm_class, eps=sizes.norm_eps)
    build_mixer = mixer or partial(Attention, sizes.dim)
    build_feed_forward = feed_forward or (lambda index: FeedForward(sizes.dim, sizes.hidden_dim))

    def block(index: int, kind: LayerKind) -> PreNormBlock:
        block_class = PreNormBlock if index < sizes.n_layers else PredictionBlock
        return block_class(sizes, norm, build_mixer(kind), build_feed_forward(index))

    return Decoder(sizes, norm, block)
