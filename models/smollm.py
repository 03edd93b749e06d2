"""SmolLM3 (Bakouch et al. 2025, https://huggingface.co/blog/smollm3): every fourth layer has no positional encoding.
Dimensions: config.json of the published model."""

from dataclasses import dataclass, replace

from models.attention import Attention, AttentionKind
from models.config_json import Config, first, list_of_layers, with_layer_types, write_layer_types
from models.decoder import Decoder, pre_norm_decoder
from models.gguf import Gguf
from models.huggingface import HuggingFace
from models.sizes import DEBUG_DERIVED, MixedSizes, repeated, require, shortest_period, text_of
from models.spec import ModelSpec, SizeError


@dataclass(frozen=True, kw_only=True)
class SmolLM3Sizes(MixedSizes):
    norm_eps: float = 1e-6
    rope_theta: float = 5e6
    no_rope_layers: tuple[bool, ...] = (True, True, True, False)
    """Whether each layer has a positional encoding. The sequence is repeated up to n_layers."""
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if not self.no_rope_layers:
            raise SizeError("no_rope_layers must have at least one value", "no_rope_layers")
        super().__post_init__()
        rotated = repeated(self.no_rope_layers, self.n_layers)
        object.__setattr__(self, "no_rope_layers", shortest_period(rotated))

    def kinds(self) -> dict[str, AttentionKind]:
        kinds = super().kinds()
        return kinds | {f"{name}_without_rope": replace(kind, rope=None) for name, kind in kinds.items()}

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        types, rotated = self.all_layer_types, repeated(self.no_rope_layers, self.n_layers)
        return tuple(
            name if has_rope else f"{name}_without_rope" for name, has_rope in zip(types, rotated, strict=True)
        )


def smollm3(sizes: SmolLM3Sizes) -> Decoder:
    bias = sizes.attention_bias
    return pre_norm_decoder(sizes, lambda kind: Attention(sizes.dim, kind, qkv_bias=bias, out_bias=bias))


def _read(config: Config) -> Config:
    layers, interval = config["num_hidden_layers"], first(config.get("no_rope_layer_interval"), 4)
    require("no_rope_layer_interval", interval, int)
    rotated = list_of_layers(config, "no_rope_layers", [(i + 1) % interval != 0 for i in range(layers)])
    if unknown := [value for value in rotated if value not in (0, 1)]:
        raise ValueError(f"no_rope_layers {text_of(unknown[0])}: each value must be 0 or 1")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    config = with_layer_types(config, lambda i: window is not None and not rotated[i])
    return {**config, "sliding_window": window, "no_rope_layers": [bool(has_rope) for has_rope in rotated]}


def _write(sizes: SmolLM3Sizes) -> Config:
    rotated = [int(has_rope) for has_rope in repeated(sizes.no_rope_layers, sizes.n_layers)]
    windows = {"use_sliding_window": sizes.window is not None, **write_layer_types(sizes)}
    return windows | {"no_rope_layers": rotated}


SMOLLM3 = ModelSpec(
    model=smollm3,
    by_size={
        "debug": SmolLM3Sizes(**DEBUG_DERIVED),
        "3b": SmolLM3Sizes(
            **{"dim": 2048, "n_layers": 36, "n_heads": 16, "n_kv_heads": 4, "head_dim": 128, "hidden_dim": 11008},
            **{"vocab_size": 128256, "tied_embeddings": True},
        ),
    },
    huggingface=HuggingFace(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        sizes_type=SmolLM3Sizes,
        fixed={"hidden_act": "silu", "mlp_bias": False},
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6}
        | {"max_position_embeddings": 32768},
        read=_read,
        write=_write,
    ),
    gguf=Gguf(
        architecture="smollm3",
        rotates_pairs=True,
        fixed=lambda sizes: {
            "no_rope_layers": shortest_period(repeated((True, True, True, False), sizes.n_layers)),
            "attention_bias": False,
        },
    ),
)
