"""Hugging Face's format of a model family: parameter names, the order of rows, and config.json."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from torch import Tensor

from models.sizes import ROPES, Sizes, require, text_of
from models.spec import SizeError

Config = Mapping[str, Any]
"""Content of config.json."""

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

FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
"""Name of a size -> its key in config.json, in all families."""

ROPE_FIELDS = {
    "rope_factor": "factor",
    "rope_original_seq_len": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
    "rope_attention_factor": "attention_factor",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
    "rope_short_factors": "short_factor",
    "rope_long_factors": "long_factor",
}
"""Name of a size -> its key in the object rope_scaling or rope_parameters of config.json."""

_OTHER_FIELDS = {
    "original_seq_len": "original_max_position_embeddings",
    "window": "sliding_window",
    "rotated_layers": "no_rope_layers",
    "rotary_fraction": "partial_rotary_factor",
    "rope_sliding_theta": "rope_local_base_freq",
    "query_beta": "llama_4_scaling_beta",
    "attention_softcap": "attn_logit_softcapping",
    "output_softcap": "final_logit_softcapping",
}
"""Name of a size that a family reads itself -> its key in config.json, for messages."""

LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}
"""Type of layer in models.sizes.WindowedSizes -> its name in config.json."""

_NESTED = ("model.language_model.", "language_model.")
"""Prefixes of the text model's tensors in a model of several modalities, in new and in old files."""


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The mapping between a model and Hugging Face's format of its family."""

    model_type: str
    architecture: str
    sizes_type: type[Sizes]
    fixed: Config = field(default_factory=dict)
    """Key of config.json -> the only supported value, which is also transformers' default."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Name of a size -> its key in config.json, in addition to FIELDS."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Name of a size -> transformers' default. Other sizes of FIELDS and `fields` must be in config.json, except n_kv_heads."""
    read: Callable[[Config], dict[str, Any]]
    """Function (config.json) -> the sizes that are not in FIELDS and `fields`. Raises ValueError."""
    write: Callable[[Any], dict[str, Any]]
    """Inverse of `read`: function (sizes) -> part of config.json."""
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    """Name of a module -> its name in Hugging Face's format. Modules of one name are stored as one tensor, in this order."""
    is_paired: bool = False
    """Whether the model rotates neighbouring values, so the rows of each head's queries and keys have another order."""

    def name(self, parameter: str) -> str:
        """Return the name of the stored tensor that contains a parameter."""
        prefix, module, leaf = _split(parameter)
        return f"model.{prefix}{self.names[module]}.{leaf}" if prefix else f"{self.names[module]}.{leaf}"

    def tensors(self, parameters: Iterable[str]) -> dict[str, list[str]]:
        """Return name of a stored tensor -> names of the parameters whose rows it contains, in order."""
        order = {module: i for i, module in enumerate(self.names)}
        stored: dict[str, list[str]] = {}
        for parameter in parameters:
            stored.setdefault(self.name(parameter), []).append(parameter)
        return {name: sorted(group, key=lambda p: order[_split(p)[1]]) for name, group in stored.items()}

    def is_permuted(self, parameter: str) -> bool:
        """Return whether Hugging Face's format has the parameter's rows in another order within each head."""
        return self.is_paired and parameter.endswith(("attention.wq.weight", "attention.wk.weight"))

    def sizes(self, config: Config) -> Any:
        """Return the sizes that a config.json describes. Raises ValueError for an unsupported model."""
        for key, value in self.fixed.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} {text_of(config[key])}: this model supports only {text_of(value)}")
        keys = FIELDS | self.fields
        values = dict(self.defaults) | present(config, keys)
        dim, n_heads = values.get("dim"), values.get("n_heads")
        if type(dim) is int and type(n_heads) is int and n_heads > 0:
            values = {"n_kv_heads": n_heads} | ({"head_dim": dim // n_heads} if "head_dim" in keys else {}) | values
        for f in fields(self.sizes_type):
            if f.name in values:
                require(keys[f.name], values[f.name], f.type)
        required = [f.name for f in fields(self.sizes_type) if f.default is MISSING]
        if missing := [keys[name] for name in required if name not in values]:
            raise ValueError(f"{missing[0]} is missing")
        values |= self.read({**config, **{keys[name]: value for name, value in values.items()}})
        try:
            return self.sizes_type(**values)
        except SizeError as error:
            keys = keys | ROPE_FIELDS | _OTHER_FIELDS
            raise ValueError(re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), str(error))) from None

    def config(self, sizes: Any, seq_len: int) -> dict[str, Any]:
        """Return the fields of config.json that depend on the model. seq_len: sequence length in training."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.fixed,
            **{key: getattr(sizes, name) for name, key in (FIELDS | self.fields).items()},
            "max_position_embeddings": max(seq_len, sizes.context_window),
            **self.write(sizes),
        }


def _split(parameter: str) -> tuple[str, str, str]:
    """Return the prefix of the block ("layers.0." or ""), the name of the module and that of the parameter in the module."""
    module, _, leaf = parameter.rpartition(".")
    if not module.startswith("layers."):
        return "", module, leaf
    _, index, inner = module.split(".", 2)
    return f"layers.{index}.", inner, leaf


def is_buffer(name: str) -> bool:
    """Return whether the tensor contains the rotary frequencies, which old versions of transformers saved."""
    return name.endswith("rotary_emb.inv_freq")


def text_config(config: Config) -> Config:
    """Return the configuration of the text model, if config.json describes a model of several modalities, otherwise `config`."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def text_name(name: str) -> str | None:
    """Return the name of a tensor in the text model, given its name in a model of several modalities. None if the tensor belongs
    to another modality."""
    for prefix in _NESTED:
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    return name if name.startswith("lm_head.") else None


def permute_to_hf(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows in Hugging Face's order. rows: weights of complete heads in Meta's order, shape (heads * head_dim, columns).
    In Meta's order, the two rows of a rotated pair are neighbours. In Hugging Face's order, the first rows of all pairs of a head
    precede the second rows of these pairs."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def permute_from_hf(rows: Tensor, head_dim: int) -> Tensor:
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def seq_len_of(config: Config) -> int:
    """Return the context window of the model that a config.json describes. Raises SizeError."""
    seq_len = first(config.get("max_position_embeddings"), 2048)  # transformers has this default for Llama
    require("max_position_embeddings", seq_len, int)
    return seq_len


# ---------------------------------------------------------------- parts of config.json


def present(config: Config, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the values in a configuration, by name of the size. keys: name of the size -> key. Null stands for no value."""
    return {name: config[key] for name, key in keys.items() if config.get(key) is not None}


def first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def get(config: Config, key: str, type_: Any, default: Any) -> Any:
    """Return the value of a key, or the default if it is missing or null. Raises SizeError if the value is not of the type."""
    value = first(config.get(key), default)
    require(key, value, type_)
    return value


def rope_object(config: Config, layer_type: str) -> Config:
    """Return the object that describes the positional encoding of this type of layer. It may describe that of all layers. Raises
    ValueError."""
    key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    rope = first(config.get(key), {})
    inner = first(rope.get(layer_type), rope) if isinstance(rope, Mapping) else None
    if not isinstance(inner, Mapping):
        raise ValueError(f"{key} {text_of(rope)}: must be null or an object")
    return inner


def sliding_theta(config: Config, default: float) -> float:
    """Return the rope_theta of layers with a window. default: that of files that do not describe each type of layer. Raises
    ValueError if the positional encoding of these layers is extended."""
    rope = rope_object(config, "sliding_attention")
    if "sliding_attention" not in first(config.get("rope_parameters"), {}):
        return default
    if first(rope.get("rope_type"), "default") != "default":
        raise ValueError(f"sliding_attention {text_of(rope)}: this model supports only the rope_type default")
    return first(rope.get("rope_theta"), default)


def read_rope(config: Config, types: Collection[str] = tuple(ROPES), default_theta: float = 10_000.0) -> dict[str, Any]:
    """Return the sizes of the positional encoding. If the layer types have different encodings, return that of full attention.
    types: supported values of rope_type. Raises ValueError."""
    rope = rope_object(config, "full_attention")
    rope_type = first(rope.get("rope_type"), rope.get("type"), "default")
    rope_type = "longrope" if rope_type == "su" else rope_type  # its name in the first files of Phi-3
    if rope_type not in types:
        supported = f"{', '.join(tuple(types)[:-1])} and {tuple(types)[-1]}"
        raise ValueError(f"rope_type {text_of(rope_type)}: this model supports only {supported}")
    used = {f"rope_{f.name}": f.default for f in fields(ROPES[rope_type])}
    keys = {name: key for name, key in ROPE_FIELDS.items() if name in used}
    values = present(rope, keys)
    theta = first(rope.get("rope_theta"), config.get("rope_theta"), default_theta)
    original, longest = "original_max_position_embeddings", "max_position_embeddings"
    if "rope_original_seq_len" in used:
        # Phi-3's files have the original length outside the object, where it takes precedence.
        for source, key in ((config, longest), (rope, original), (config, original)):
            values |= present(source, {"rope_original_seq_len": key})
    if rope_type in ("yarn", "longrope") and "rope_factor" not in values and config.get(longest) is not None:
        require(longest, config[longest], int)
        require(original, values["rope_original_seq_len"], int)
        values["rope_factor"] = config[longest] / values["rope_original_seq_len"]
    if missing := [keys[name] for name in keys if name not in values and used[name] is MISSING]:
        raise ValueError(f"{missing[0]} is missing")
    return {"rope_theta": theta, "rope_type": rope_type} | values


def write_rope(sizes: Any) -> dict[str, Any]:
    """Return the part of config.json that describes the positional encoding. All versions of transformers read this form."""
    default = {f"rope_{f.name}": f.default for f in fields(ROPES[sizes.rope_type])}
    values = {
        key: getattr(sizes, name)
        for name, key in ROPE_FIELDS.items()
        if name in default and getattr(sizes, name) != default[name]
    }
    scaling = {"rope_type": sizes.rope_type} | {
        key: list(v) if isinstance(v, tuple) else v for key, v in values.items()
    }
    return {"rope_theta": sizes.rope_theta, "rope_scaling": None if sizes.rope_type == "default" else scaling}


def write_rope_by_type(sizes: Any, sliding_theta: float) -> dict[str, Any]:
    """Return the same for a model whose sliding layers have an encoding of their own, which is not extended."""
    rope = write_rope(sizes)
    full = first(rope["rope_scaling"], {"rope_type": "default"}) | {"rope_theta": sizes.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": sliding_theta}
    return rope | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def read_windows(config: Config, default: Sequence[str]) -> dict[str, Any]:
    """Return the window and the types of the layers. default: types of all layers if the file does not list them. Raises
    ValueError."""
    window, listed = config.get("sliding_window"), config.get("layer_types")
    names = {hf: name for name, hf in LAYER_TYPES.items()}
    if listed is None:
        types = tuple(default)
    elif isinstance(listed, list) and len(listed) == config.get("num_hidden_layers"):
        if unknown := [name for name in listed if name not in names]:
            raise ValueError(f"layer_types {text_of(unknown[0])}: this model supports only {' and '.join(names)}")
        types = tuple(names[name] for name in listed)
    else:
        raise ValueError("layer_types must have one entry for each of the num_hidden_layers layers")
    if window is None:
        types = ("full",)
    return {"window": window if "sliding" in types else None, "layer_types": shortest_period(types)}


def write_windows(sizes: Any) -> dict[str, Any]:
    return {"sliding_window": sizes.window, "layer_types": [LAYER_TYPES[name] for name in sizes.all_layer_types]}


def shortest_period(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shortest sequence whose repetition has all values as its beginning."""
    lengths = range(1, len(values) + 1)
    return tuple(next(values[:n] for n in lengths if all(v == values[i % n] for i, v in enumerate(values))))
