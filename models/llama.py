"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023, arXiv:2307.09288; Llama Team 2024, arXiv:2407.21783). They share one model and
differ only in its sizes. Dimensions are those that Meta published."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from models.attention import Attention
from models.decoder import Decoder, pre_norm_decoder
from models.gguf import Gguf
from models.huggingface import HuggingFace
from models.rope import rotate_pairs
from models.sizes import Sizes
from models.spec import ModelSpec, SizeError


@dataclass(frozen=True, kw_only=True)
class LlamaSizes(Sizes):
    ROPE_TYPES: ClassVar = ("default", "llama3")
    rope_theta: float = 500_000.0
    original_seq_len: int = 8192
    """Sequence length of the original training, before the frequencies were scaled. It is used only if rope_factor is not 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.n_heads:
            raise SizeError(f"n_heads {self.n_heads} must divide dim {self.dim}", "n_heads", "dim")
        if self.head_dim % 2:
            message = f"dim {self.dim} / n_heads {self.n_heads} must be even: rotary embeddings rotate pairs"
            raise SizeError(message, "n_heads", "dim")
        self._require_frequency_range()

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def rope_type(self) -> str:
        return "llama3" if self.rope_factor != 1.0 else "default"

    @property
    def rope_original_seq_len(self) -> int:
        return self.original_seq_len


def llama(sizes: LlamaSizes) -> Decoder:
    return pre_norm_decoder(sizes, lambda kind: Attention(sizes.dim, kind, rotate_pairs))


_HUGGINGFACE = HuggingFace(
    model_type="llama",
    architecture="LlamaForCausalLM",
    sizes_type=LlamaSizes,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    is_paired=True,
)
_GGUF = Gguf(architecture="llama", rotates_pairs=True, rope_types=("default", "llama3"))
_llama2 = partial(LlamaSizes, vocab_size=32000, rope_theta=10_000.0)
LLAMA2 = ModelSpec(
    model=llama,
    by_size={
        "7b": _llama2(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "13b": _llama2(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, hidden_dim=13824),
        "70b": _llama2(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
    },
    huggingface=_HUGGINGFACE,
    gguf=_GGUF,
)

_llama3 = partial(LlamaSizes, vocab_size=128256)
LLAMA3 = ModelSpec(
    model=llama,
    by_size={
        # Small enough for a laptop, and divisible by every layout on eight ranks. The shipped tokenizer has 2048 tokens.
        "debug": LlamaSizes(dim=128, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=352, vocab_size=2048),
        "8b": _llama3(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336),
        "70b": _llama3(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
    },
    huggingface=_HUGGINGFACE,
    gguf=_GGUF,
)
LLAMA3_1 = ModelSpec(
    model=llama,
    by_size={
        "8b": _llama3(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336, rope_factor=8.0),
        "70b": _llama3(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672, rope_factor=8.0),
        "405b": _llama3(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, hidden_dim=53248, rope_factor=8.0),
    },
    huggingface=_HUGGINGFACE,
    gguf=_GGUF,
)

_llama3_2 = partial(LlamaSizes, vocab_size=128256, rope_factor=32.0, tied_embeddings=True)
LLAMA3_2 = ModelSpec(
    model=llama,
    by_size={
        "1b": _llama3_2(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, hidden_dim=8192),
        "3b": _llama3_2(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, hidden_dim=8192),
    },
    huggingface=_HUGGINGFACE,
    gguf=_GGUF,
)
