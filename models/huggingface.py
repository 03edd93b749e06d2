"""Facts about Hugging Face's format of a model family: parameter names, the order of rows, and config.json."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from models.config_json import PREDICTION_KEY, Config
from models.sizes import Sizes

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""Name of a module -> its name in most of Hugging Face's families. Names inside a block are relative to it."""

MIXTURE_NAMES = NAMES | {
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
    "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
    "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
}
"""NAMES with those of a mixture of experts in most of Hugging Face's families."""


def shared_expert_names(module: str) -> dict[str, str]:
    """Return the names of a shared expert's matrices. module: name of the expert in the files."""
    matrices = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return {f"feed_forward.shared.{name}": f"{module}.{stored}" for name, stored in matrices.items()}


PREDICTION_COPIES = {"embed_tokens": "tok_embeddings", "shared_head.head": "output"}
"""HuggingFace.prediction_copies of the families whose files have them."""
FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "window": "sliding_window",
    "n_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "normalize_weights": "norm_topk_prob",
    "expert_hidden_dim": "moe_intermediate_size",
    "prediction_layers": PREDICTION_KEY,
}
"""Name of a size -> its key in config.json. Sizes that are not listed have the same name there."""


@dataclass(frozen=True, kw_only=True)
class StoredStack:
    """The place of stacked parameters, matrices or vectors, in a stored tensor that is stacked too."""

    name: str
    """Name of the stored tensor inside a block, without a suffix. It may contain several parameters."""
    transposed: bool = False
    """Whether the stored matrices have one column, instead of one row, for each row of the parameter's."""
    first: int = 0
    """Index of the parameter's first row in a stored matrix that is not transposed."""
    step: int = 1
    """Distance of the parameter's rows there, which is also the number of parameters in the stored tensor."""

    def rows(self, matrix: Tensor) -> Tensor:
        """Return a view of the parameter's rows in a stored matrix or vector of one expert, or in a part of it that begins with
        a multiple of `step` rows."""
        return (matrix.mT if self.transposed else matrix)[self.first :: self.step]


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The mapping between a model and Hugging Face's format of its family."""

    model_type: str
    other_model_types: tuple[str, ...] = ()
    """Types of models of the same architecture, which are read as this one."""
    architecture: str
    sizes_type: type[Sizes]
    fixed: Config = field(default_factory=lambda: {"hidden_act": "silu"})
    """Key of config.json -> the only supported value, which is also transformers' default."""
    defaults: Config = field(default_factory=dict)
    """Key of config.json -> transformers' default, if it differs from _DEFAULTS or, for other keys, from the size's default."""
    read: Callable[[Config], Config] = lambda config: config
    """Function (config.json with defaults) -> config.json with the keys and values of all families. Raises ValueError."""
    write: Callable[[Any], Config] = lambda sizes: {}
    """Inverse of `read`: function (sizes) -> the part of config.json that is specific to this family."""
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    """Name of a module -> its name in Hugging Face's format. Modules of one name are stored as one tensor, in this order. The key
    of stacked matrices is the name of the parameter, and {} in its value is the index of the expert: each of its matrices is a
    stored tensor. The matrix of expert 3 of the parameter `name` is called `name@3`. Another key that names a parameter or a
    buffer instead of a module has the complete name as its value."""
    stored_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a vector in a block -> shape of its tensor in the files, with -1 for its values, if the tensor has more dims."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Part of a tensor's name -> this part in other files of the family, such as those that transformers writes."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """Part of a name in the files -> this part in the name of transformers' module, which peft's files contain."""
    prediction_names: Mapping[str, str] = field(default_factory=dict)
    """Beginning of a tensor's name inside the layer for multi-token prediction, "" for any -> beginning of its name in the files,
    where this layer is not the one after the others. The first that fits counts."""
    prediction_copies: Mapping[str, str] = field(default_factory=dict)
    """Module inside a layer for multi-token prediction in the files -> module of the model whose weight it repeats. Copies are
    written, but not read."""
    stacks: Mapping[str, StoredStack] = field(default_factory=dict)
    """Name of a stacked parameter -> its place, if the stored tensor is stacked too. Names inside a block are relative to it."""
    quantizations: Collection[str] = ()
    """Values of quant_method in quantization_config whose weights can be read."""
    omitted: Collection[str] = ()
    """Sizes that are no keys of this family's config.json. `read` returns them by their own names if they are not constant."""
    size_keys: Config = field(default_factory=dict)
    """Name of a size -> its key in this family's config.json, if it differs from FIELDS."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key of config.json, which transformers' class of this family reads too -> the key."""
    writes_rope: bool = True
    """Whether config.json describes the positional encoding as write_rope does. Otherwise only `write` does."""
    has_layer_config: bool = False
    """Whether `read` reads per_layer_config, sizes of single layers. Otherwise it must be empty."""
    is_paired: bool = False
    """Whether the model rotates neighbouring values, so the rows of each head's queries and keys have another order."""
    byte_level_class: str = ""
    """Value of tokenizer_class by which other readers than transformers recognize a byte-level tokenizer, or "" for any value."""
    forced_class: str = ""
    """Class with which transformers 5 loads all tokenizers of this type of model, or "" for the one that the files name."""
