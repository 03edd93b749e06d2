"""Width transfer: initial values for which rates that were tuned on a narrow model suit a wide one (maximal update
parametrization, Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, Table 3).

A wider model has larger `dim` and, in proportion, more heads and wider feed-forward layers (GROWING in models/sizes.py). Rules
state how their rates follow (trainer/optim/rules.py).
"""

from torch import nn

from models.spec import is_bias

WIDTH_ROLES = {
    "vector": 0.0,  # a norm or a bias: a constant
    "input": -0.5,  # an embedding: the variance of init_parameter, 1 / dim, stays 1 / base width
    "scaled_input": 0.0,  # an embedding that is multiplied by sqrt(dim), which cancels 1 / dim
    "widening": 0.0,  # a matrix with a constant number of inputs: variance 1 / number of inputs
    "hidden": 0.0,  # variance 1 / number of inputs, which grows
    "output": 0.5,  # a constant number of outputs, such as logits: variance base width / dim**2
}
"""Role of a parameter, by which of its dims grow with the width: none or its only one, its outputs (three roles), both, its
inputs -> power of base width / dim that multiplies the initial values of Model.init_parameter."""


def width_role(model: nn.Module, name: str) -> str:
    """Return the role of a parameter, a key of WIDTH_ROLES. A module that is no embedding, or whose matrices do not have growing
    inputs and outputs, names the role of its weight in WIDTH.

    Args:
        model: Contains the parameter. It may be parallelized.
        name: Of the parameter.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.RMSNorm) or is_bias(model, name):
        return "vector"
    return getattr(module, "WIDTH", "input" if isinstance(module, nn.Embedding) else "hidden")
