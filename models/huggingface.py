"""Hugging Face's format of a model family: parameter names, the order of rows, and config.json."""

import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import accumulate
from typing import Any, get_args

import torch
from torch import Tensor

from models.config_json import ROPE_FIELDS, Config, first, read_rope, read_windows, write_rope
from models.sizes import Sizes, require, text_of
from models.spec import SizeError

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
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "window": "sliding_window",
    "n_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "normalize_weights": "norm_topk_prob",
    "expert_hidden_dim": "moe_intermediate_size",
}
"""Name of a size -> its key in config.json. Sizes that are not listed have the same name there."""

_SHARED = {*ROPE_FIELDS, "rope_theta", "rope_type", "rope_is_long", "window", "layer_types"}
"""Sizes that are read by read_rope and read_windows, or that config.json does not contain."""

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
"""Defaults that most of transformers' families have."""

MIXTURE_NAMES = NAMES | {
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
    "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
    "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
}
"""NAMES with those of a mixture of experts in most of Hugging Face's families."""


TEXT_MODEL = "model"
"""Name of the text model among the modules of transformers' classes for models without other modalities."""


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
    ignored: Callable[[Config, Any], Collection[str]] = lambda config, sizes: ()
    """Function (config.json, sizes) -> modules in Hugging Face's format that are not part of the model, but whose tensors may be
    in its files."""
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
    is_paired: bool = False
    """Whether the model rotates neighbouring values, so the rows of each head's queries and keys have another order."""
    byte_level_class: str = ""
    """Value of tokenizer_class by which other readers than transformers recognize a byte-level tokenizer, or "" for any value."""
    forced_class: str = ""
    """Class with which transformers 5 loads all tokenizers of this type of model, or "" for the one that the files name."""

    def is_stack(self, parameter: str) -> bool:
        """Return whether a parameter is a stack, whose matrices or vectors are read and written one by one."""
        _, module, leaf = _split(parameter)
        return "{}" in self.names.get(f"{module}.{leaf}", "") or self.stack_of(parameter) is not None

    def stack_of(self, matrix: str) -> StoredStack | None:
        """Return the place of a matrix, or of its parameter, in a stored stack. None: it is not in a stored stack."""
        _, module, leaf = _split(matrix.partition("@")[0])
        return self.stacks.get(f"{module}.{leaf}")

    def matrices(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters by name, with the matrices of a stack as `name@expert`."""
        values: dict[str, Tensor] = {}
        for name, value in parameters.items():
            values |= (
                {f"{name}@{i}": matrix for i, matrix in enumerate(value)} if self.is_stack(name) else {name: value}
            )
        return values

    def name(self, matrix: str) -> str:
        """Return the name of the stored tensor that contains a matrix: a parameter, or `name@expert` of a stack."""
        parameter, _, expert = matrix.partition("@")
        prefix, module, leaf = _split(parameter)
        if (stack := self.stack_of(parameter)) is not None:
            return f"model.{prefix}{stack.name}"
        if expert:
            stored = f"{self.names[f'{module}.{leaf}'].format(expert)}.weight"
        else:
            stored = self.names.get(f"{module}.{leaf}") or f"{self.names[module]}.{leaf}"
        return f"model.{prefix}{stored}" if prefix else stored

    def tensors(self, matrices: Iterable[str]) -> dict[str, list[str]]:
        """Return name of a stored tensor -> names of the matrices whose rows it contains, in order. See `name`."""
        order = {module: i for i, module in enumerate(self.names)}
        stored: dict[str, list[str]] = {}
        for matrix in matrices:
            stored.setdefault(self.name(matrix), []).append(matrix)
        joined = {name for name, group in stored.items() if len(group) > 1 and self.stack_of(group[0]) is None}
        return {
            name: sorted(group, key=lambda m: order[_split(m)[1]]) if name in joined else group
            for name, group in stored.items()
        }

    def stack_matrix(self, matrices: Mapping[str, Tensor]) -> Tensor:
        """Return the matrix of one expert in a stored stack. matrices: by name, all that this matrix contains."""
        first = next(iter(matrices.values()))
        stored = first.new_empty(sum(map(len, matrices.values())), *first.shape[1:])
        for name, rows in matrices.items():
            stack = self.stack_of(name)
            stored[stack.first :: stack.step] = rows
        return stored.mT if stack.transposed else stored

    def first_rows(self, matrices: Mapping[str, Tensor]) -> dict[str, int]:
        """Return name of a matrix -> its first row in the stored tensor."""
        rows = {}
        for group in self.tensors(matrices).values():
            ends = accumulate((matrices[name].shape[0] for name in group), initial=0)
            rows |= dict(zip(group, ends, strict=False))
        return rows

    def is_permuted(self, parameter: str) -> bool:
        """Return whether Hugging Face's format has the parameter's rows in another order within each head."""
        return self.is_paired and parameter.endswith(("attention.wq.weight", "attention.wk.weight"))

    def reorder(self, parameter: str, rows: Tensor, head_dim: int) -> Tensor:
        """Return rows of a parameter in Hugging Face's order. rows: of complete heads."""
        return permute_to_hf(rows, head_dim) if self.is_permuted(parameter) else rows

    def restore(self, parameter: str, rows: Tensor, head_dim: int) -> Tensor:
        """Inverse of `reorder`."""
        return permute_from_hf(rows, head_dim) if self.is_permuted(parameter) else rows

    def join(self, parameters: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
        """Return name of a stored tensor -> tensor. parameters: by native name."""
        matrices = self.matrices(parameters)
        return {
            stored: torch.cat([self.reorder(name, matrices[name], head_dim) for name in names])
            if self.stack_of(names[0]) is None
            else torch.stack([self.stack_matrix({n: matrices[n] for n in group}) for group in by_expert(names)])
            for stored, names in self.tensors(matrices).items()
        }

    def split(
        self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], head_dim: int
    ) -> dict[str, Tensor]:
        """Inverse of `join`. parameters: tensors of the native shapes."""
        matrices, rows = self.matrices(parameters), {}
        for stored, names in self.tensors(matrices).items():
            if self.stack_of(names[0]) is not None:
                for name in names:
                    rows[name] = self.stack_of(name).rows(tensors[stored][int(name.partition("@")[2])])
                continue
            parts = tensors[stored].split([len(matrices[name]) for name in names])
            for name, part in zip(names, parts, strict=True):
                rows[name] = self.restore(name, part, head_dim)
        return {
            name: torch.stack([rows[f"{name}@{i}"] for i in range(len(value))]) if self.is_stack(name) else rows[name]
            for name, value in parameters.items()
        }

    def sizes(self, config: Config) -> Any:
        """Return the sizes that a config.json describes. Raises ValueError for an unsupported model."""
        for key, value in self.fixed.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} {text_of(config[key])}: this model supports only {text_of(value)}")
        if per_layer := config.get("per_layer_config"):
            raise ValueError(f"per_layer_config {text_of(per_layer)}: this model supports no sizes of single layers")
        with self._own_keys(config) as own_config:
            return self._sizes(own_config)

    def skipped(self, config: Config, sizes: Any) -> Collection[str]:
        """Return the modules in Hugging Face's format that are not read, see `ignored`. Raises ValueError."""
        with self._own_keys(config) as own_config:
            return self.ignored(own_config, sizes)

    def _sizes(self, config: Config) -> Any:
        """Return the sizes. config: with the family's own keys."""
        defaults = _DEFAULTS | self.defaults
        nullable = {self._key(f.name) for f in fields(self.sizes_type) if types.NoneType in get_args(f.type)}
        nullable |= {"num_key_value_heads"}  # null: as many as heads
        given = {key: v for key, v in config.items() if v is not None or key in nullable or key not in defaults}
        config = defaults | given
        own = {f for f in fields(self.sizes_type) if f.name not in _SHARED}
        common = {f for f in own if f.name in {g.name for g in fields(Sizes)}}
        self._check(config, common)
        derived = {"num_key_value_heads": config["num_attention_heads"]}
        derived[self._key("head_dim")] = config["hidden_size"] // config["num_attention_heads"]
        config = self.read({**config, **{key: v for key, v in derived.items() if config.get(key) is None}})
        self._check(config, {f for f in own - common if f.name not in self.omitted})
        values = {f.name: config[self._key(f.name)] for f in own if self._key(f.name) in config}
        names = {f.name for f in fields(self.sizes_type)}
        values |= read_windows(config, names) | read_rope(config, self.sizes_type)
        try:
            sizes = self.sizes_type(**{name: value for name, value in values.items() if name in names})
        except SizeError as error:
            raise ValueError(_renamed(str(error), FIELDS | ROPE_FIELDS | self.size_keys)) from None
        # None: a family with another key of this size, of which `read` compares head_dim.
        if config.get("head_dim") not in (None, sizes.head_dim):
            message = f"must be hidden_size / num_attention_heads = {sizes.head_dim}"
            raise ValueError(f"head_dim {text_of(config['head_dim'])}: {message}")
        return sizes

    def key_of(self, size: str, config: Config) -> str:
        """Return the key of a size in a config.json, which may be one of `aliases`."""
        key = self._key(size)
        return next((a for a, k in self.aliases.items() if k == key and config.get(a) is not None), key)

    def seq_len(self, config: Config) -> int:
        """Return the context window of the model that a config.json describes. Raises SizeError."""
        key = "max_position_embeddings"
        seq_len = first(config.get(key), self.defaults.get(key), 2048)  # most classes of transformers have this default
        require(key, seq_len, int)
        return seq_len

    def config(self, sizes: Any, context_window: int) -> dict[str, Any]:
        """Return the fields of config.json that depend on the model. context_window: longest sequence in training."""
        own = [f.name for f in fields(sizes) if f.name not in _SHARED | {*self.omitted} or f.name == "window"]
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.fixed,
            **{self._key(name): getattr(sizes, name) for name in own},
            "head_dim": sizes.head_dim,
            "max_position_embeddings": max(context_window, sizes.context_window),
            **write_rope(sizes),
            **self.write(sizes),
        }

    def _key(self, size: str) -> str:
        """Return the key of a size in config.json, or its name if it is omitted there."""
        return size if size in self.omitted else self.size_keys.get(size, FIELDS.get(size, size))

    @contextmanager
    def _own_keys(self, config: Config) -> Iterator[Config]:
        """Context manager with the configuration in which `aliases` are replaced. Errors have the names that the file has."""
        given = {}
        for alias, key in self.aliases.items():
            if (value := config.get(alias)) is None:
                continue
            if config.get(key) is None:
                given[key] = alias
            elif config[key] != value:
                values = f"{key} {text_of(config[key])} and {alias} {text_of(value)}"
                raise ValueError(f"{values} must be equal: they are the same setting")
            config = {**config, key: value}
        try:
            yield config
        except ValueError as error:
            raise ValueError(_renamed(str(error), given)) from None

    def _check(self, config: Config, sizes: Iterable[Field]) -> None:
        """Raise ValueError if a size has a wrong type, or is missing although it is neither derived nor has a default."""
        for f in sorted(sizes, key=lambda f: f.name):
            if config.get(self._key(f.name)) is not None:
                require(self._key(f.name), config[self._key(f.name)], f.type)
            elif f.default is MISSING and f.name not in ("n_kv_heads", "head_dim"):
                raise ValueError(f"{self._key(f.name)} is missing")


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """Return the message with some words replaced."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), message)


def _split(parameter: str) -> tuple[str, str, str]:
    """Return the prefix of the block ("layers.0." or ""), the name of the module and that of the parameter in the module."""
    module, _, leaf = parameter.rpartition(".")
    if not module.startswith("layers."):
        return "", module, leaf
    _, index, inner = module.split(".", 2)
    return f"layers.{index}.", inner, leaf


def by_expert(matrices: Iterable[str]) -> list[list[str]]:
    """Return the names of matrices, `name@expert`, by expert in order."""
    groups: dict[int, list[str]] = {}
    for matrix in matrices:
        groups.setdefault(int(matrix.partition("@")[2]), []).append(matrix)
    return [groups[expert] for expert in sorted(groups)]


def text_name(name: str) -> str | None:
    """Return the name of a tensor in the text model, given its name in a multimodal model. None if the tensor belongs to another
    modality."""
    for prefix in ("model.language_model.", "language_model."):  # in new and in old files
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
    """Inverse of permute_to_hf."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
