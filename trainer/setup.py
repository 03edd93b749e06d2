"""What a configuration means on a number of ranks, found before any process group exists."""

from dataclasses import dataclass
from typing import Any

from models import MODELS
from models.spec import ModelSpec
from trainer.config import Config, ConfigError, ModelConfig
from trainer.data.tokenizers import Tokenizer, load_tokenizer
from trainer.parallel.dims import ParallelDims
from trainer.settings import nearest_name


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a configuration means on a number of ranks; found without a process group."""

    spec: ModelSpec
    sizes: Any
    dims: ParallelDims
    tokenizer: Tokenizer


def set_up(config: Config, world_size: int) -> Setup:
    """Raises ConfigError for every combination that cannot run."""
    spec, sizes = model_of(config.model)
    dims = ParallelDims.of(config.parallel, world_size)
    training = config.training
    together = training.local_batch_size * dims.batch
    if training.global_batch_size % together:
        raise ConfigError(
            "training.global_batch_size",
            f"must be a multiple of local_batch_size {training.local_batch_size} x {dims.batch} data-parallel ranks "
            f"= {together}",
        )
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > sizes.vocab_size:
        raise ConfigError(
            "tokenizer.kind",
            f"the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size of {config.model.name}/"
            f"{config.model.size} is {sizes.vocab_size}",
        )
    return Setup(spec=spec, sizes=sizes, dims=dims, tokenizer=tokenizer)


def model_of(config: ModelConfig) -> tuple[ModelSpec, Any]:
    """The family, and its named size with the overrides in it."""
    if config.name not in MODELS:
        raise ConfigError("model.name", f"expected one of {', '.join(MODELS)}{nearest_name(config.name, MODELS)}")
    spec = MODELS[config.name]
    if config.size not in spec.sizes:
        expected = f"expected one of {', '.join(spec.sizes)}"
        raise ConfigError("model.size", f"{expected} for {config.name}{nearest_name(config.size, spec.sizes)}")
    values = vars(spec.sizes[config.size]) | config.overrides
    for name, value in config.overrides.items():
        key = f"model.overrides.{name}"
        standard = vars(spec.sizes[config.size]).get(name)
        if standard is None:
            known = vars(spec.sizes[config.size])
            raise ConfigError(key, f"unknown dimension of {config.name}{nearest_name(name, known)}")
        if isinstance(standard, float) and type(value) is int:
            values[name] = float(value)
        elif type(value) is not type(standard):
            kinds = {int: "a whole number", float: "a number", bool: "true or false"}
            raise ConfigError(key, f"expected {kinds[type(standard)]}")
    try:
        return spec, type(spec.sizes[config.size])(**values)
    except ValueError as error:
        raise ConfigError("model.overrides", str(error)) from None
