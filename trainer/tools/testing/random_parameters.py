"""Random parameters for comparisons with other implementations of a model."""

import torch
from torch import nn


def randomize(model: nn.Module) -> None:
    """Draw all parameters and saved buffers. Norms and buffers must be initialized. They then deviate from the values that would
    hide an error."""
    draw, saved = torch.Generator().manual_seed(0), model.state_dict().keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=draw)
            elif "norm" in name:  # in this project and in transformers, whose classes of norms have no common base
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.2)
            else:
                parameter.normal_(0, 0.2, generator=draw)
        for buffer in (b for name, b in model.named_buffers() if name in saved):
            buffer.add_(torch.randn(buffer.shape, generator=draw), alpha=0.2)
