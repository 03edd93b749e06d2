"""Settings of the model: its dimensions, its tokenizer, its adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainer.base.config.schema.condition import When
from trainer.base.config.schema.constraint import FIXED, PER_NODE, Constraint

NAMED_MODEL = Constraint(used_with=When("model.huggingface", negated=True))
ADAPTED = Constraint(only_with=(When("lora.rank"),))
ModelFamily = Literal[
    "llama2", "llama3", "llama3.1", "llama3.2", "qwen2.5", "qwen3", "mistral", "ministral3", "smollm3", "olmo2", "olmo3",
    "granite3", "gemma2", "gemma3", "phi", "mixtral", "olmoe", "qwen3-moe",
    "deepseek-v3", "gpt-oss", "gemma4", "glm-4.5", "qwen3-next", "qwen3.5", "olmo-hybrid", "kimi-linear",
]  # fmt: skip
"""The keys of MODELS in models/__init__.py, which imports torch."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    pretrained: Annotated[str, PER_NODE] = ""
    """A model that gives dimensions, initial weights, tokenizer and chat template: a folder in Hugging Face's format, a run
    folder or a checkpoint, or the name of a model on the Hugging Face Hub, such as Qwen/Qwen3-0.6B. Settings that are given
    beside it take precedence. `--from X` is short for `--model.pretrained X`, which also precedes the
    settings of the TOML file."""
    revision: Annotated[str, Constraint(only_with=(When("model.pretrained"),))] = ""
    """Commit, branch or tag of the model on the Hub. Empty: main. A run records the commit, with which it also resumes."""
    huggingface: Annotated[str, PER_NODE] = ""
    """Path of a folder in Hugging Face's format, of its config.json, or of a checkpoint, which gives the family and the
    dimensions of the model instead of `name` and `size`. It loads no weights; `pretrained` does."""
    name: Annotated[str, FIXED, NAMED_MODEL] = "llama3"
    """Name of the model family, such as qwen3 (docs/models.md)."""
    size: Annotated[str, FIXED, NAMED_MODEL] = "debug"
    """Name of one of the family's model sizes."""
    overrides: Annotated[Mapping[str, int | float | bool | str | tuple[int | float | bool | str, ...]], FIXED] = field(
        default_factory=dict
    )
    """Dimensions that replace those of the named size: `overrides = { n_layers = 4 }` or `--model.overrides.n_layers 4`. Beside
    initial weights, they may extend the context window: rope_theta, rope_type and others with such names."""
    context_window: Annotated[int, Constraint(min=0, max=2**31, unit="tokens")] = 0
    """Context window that exports state. 0: that of the initial model, which a longer [training] seq_len does not change without
    an extension in overrides; of a new or extended model, seq_len."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    backend: Literal["default", "tiktoken", "sentencepiece", "huggingface", "tekken"] = "default"
    """Type of tokenizer. "default": the small tokenizer in this repository; "tiktoken": a tiktoken file such as Llama 3's;
    "sentencepiece": a Llama 2 model file; "huggingface": a tokenizer.json, read by the package `tokenizers`; "tekken": a
    tekken.json of Mistral."""
    pattern: Annotated[str, Constraint(only_with=(When("tokenizer.backend", ("tiktoken",)),))] = ""
    """Pattern that splits text before bytes are merged, as in the training of the file: "llama3", "llama4", "qwen2", "gpt2",
    "cl100k", "o200k", or a regular expression. Empty: "llama3". A file with as many tokens as that of another known model is then
    an error; any other file gets a warning, except Llama 3's and the default one."""
    reuse_reserved_tokens: Annotated[
        Mapping[str, str],
        FIXED,
        Constraint(free_keys=True, only_with=(When("tokenizer.backend", ("default", "tiktoken", "tekken")),)),
    ] = field(default_factory=dict)
    """New names for reserved tokens (their ids do not change): { "<|im_start|>" = "<|reserved_special_token_0|>" }."""
    extra_special_tokens: Annotated[tuple[str, ...], FIXED] = ()
    """Special tokens to add after the end of the vocabulary. The model's vocab_size must be large enough for them."""
    path: Annotated[str, PER_NODE, Constraint(only_with=(When("tokenizer.backend", ("default",), negated=True),))] = ""
    """Path of the tokenizer's file, or of the folder of a model or a run that contains it. Without `backend`, the type follows
    from the file."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: Annotated[int | None, Constraint(min=1, max=2**16, fixed_on_resume=True)] = None
    """Rank of the adapters: the product of two matrices of this rank is added to each target, and only these matrices are trained
    (Hu et al. 2021, arXiv:2106.09685). [checkpoint] init_from names the base model. "none": train all parameters."""
    alpha: Annotated[float, ADAPTED, Constraint(exclusive_min=0, max=10**6, fixed_on_resume=True)] = 32.0
    """Numerator of the scale alpha / rank, by which each product is multiplied. If alpha is constant, the best learning rate
    depends little on the rank."""
    rslora: Annotated[bool, ADAPTED, FIXED] = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732)."""
    dropout: Annotated[float, ADAPTED, Constraint(min=0, max=0.9)] = 0.0
    """Probability with which a value of an adapter's input is set to zero in training. The values depend on the seed, not on the
    layout."""
    targets: Annotated[tuple[str, ...], ADAPTED, FIXED] = ("*",)
    """Names of linear modules of the blocks and of matrices of experts, or patterns: "*.attention.w[qv]", "layers.3.*",
    "*.experts.w1". "*": all of them."""
    train_fully: Annotated[tuple[str, ...], ADAPTED, FIXED] = ()
    """Names or patterns of modules whose own parameters are trained in addition to the adapters: "tok_embeddings", "*norm"."""
    init: Annotated[Literal["kaiming", "gaussian"], ADAPTED] = "kaiming"
    """Initial values of the first matrix: "kaiming": uniform up to 1 / sqrt(inputs); "gaussian": normal, with standard deviation
    1 / rank. The second matrix starts at zero."""
    init_from: Annotated[str, ADAPTED] = ""
    """Path of an adapter to continue with: a run folder (or RUN_FOLDER@best), a checkpoint, or a folder of the package peft."""
    dtype: Annotated[Literal["fp32", "bf16"], ADAPTED, FIXED] = "fp32"
    """Precision of the trained parameters between steps. Frozen parameters have [training] parameter_dtype."""
    base_dtype: Annotated[Literal["keep", "nf4", "nf4_double"], ADAPTED, FIXED] = "keep"
    """How frozen matrices of the blocks' linear modules and experts are kept between their uses. "keep": in [training]
    parameter_dtype; "nf4": in 4 bits, with a bf16 scale for each 64 values of a row (QLoRA, Dettmers et al. 2023,
    arXiv:2305.14314); "nf4_double": the scales in 8 bits too. They are quantized while they are loaded."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def quantizes_scales(self) -> bool:
        """Whether the scales of a base model in 4 bits are quantized too."""
        return self.base_dtype == "nf4_double"

    @property
    def base_format(self) -> str:
        """What base_dtype stands for, where files of another version may mean something else."""
        return "nf4_double (fourth roots of scales)" if self.quantizes_scales else self.base_dtype
