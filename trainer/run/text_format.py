"""How the texts of a run become tokens: its tokenizer and its chat template."""

from dataclasses import dataclass, replace

from trainer.base.config import Config, ConfigError, DataConfig, TokenizerConfig
from trainer.base.config.schema.data import CHAT_DATASETS
from trainer.base.system import console
from trainer.checkpoint.resume import ResumePoint, require_compatible
from trainer.data.chat import template_files
from trainer.data.datasets import dataset_configs
from trainer.data.prepare.encode import chat_format
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.run.resolve import ResolvedRun
from trainer.runtime.distributed import run_on_rank_0


@dataclass(frozen=True)
class TextFormat:
    tokenizer: Tokenizer
    chat_template: str
    """Self-contained chat template, or "" if the run does not train on conversations."""
    end_of_turn: tuple[int, ...]
    """Ids of the tokens that end an answer in a conversation."""

    @property
    def is_chat(self) -> bool:
        """Whether the run trains on conversations."""
        return bool(self.chat_template)


def load_text_format(config: Config, resolved: ResolvedRun) -> TextFormat:
    """Load the tokenizer on each rank, and the chat template on rank 0, collectively. Raises ConfigError if one of them cannot be
    used, or if the tokenizer has more tokens than the model."""
    tokenizer = load_tokenizer(config.tokenizer)
    for warning in tokenizer.warnings:
        console.warning(warning)
    name, vocab_size = resolved.model_name, resolved.sizes.vocab_size
    if tokenizer.vocab_size > vocab_size:
        setting = "model.overrides.vocab_size" if "vocab_size" in config.model.overrides else "tokenizer.backend"
        message = f"the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size of {name} is {vocab_size}"
        raise ConfigError(setting, message)
    if all(member.dataset not in CHAT_DATASETS for member in dataset_configs(config.data).values()):
        return TextFormat(tokenizer, chat_template="", end_of_turn=())

    def validated_template() -> tuple[str, tuple[int, ...]]:
        chat = chat_format(config.data, tokenizer)
        return chat.self_contained(), tuple(chat.end_of_turn)

    return TextFormat(tokenizer, *run_on_rank_0(validated_template))


def unused_template(config: Config, family: str, tokenizer: Tokenizer) -> str:
    """Return a line about the template that the model most probably has, if the default one is used instead, or ""."""
    default, special = DataConfig().chat_template, [*tokenizer.special_tokens, *tokenizer.added_tokens]
    if template_files.SETTING in config.origins or config.data.chat_template != default:
        return ""
    used = f'the default, data.chat_template = "{default}", is used'
    if template_files.own_template(tokenizer.files):
        return f"{used}, although the tokenizer has a chat template of its own; set data.chat_template to its folder"
    others = [name for name in template_files.usable_templates(special) if name.startswith(family.removesuffix("-moe"))]
    if not others or family.startswith(default):
        return ""
    return (
        f'{used}, although the model is {family}; set data.chat_template = "{others[0]}", or "{default}" if it is meant'
    )


def require_same_tokenizer(point: ResumePoint, config: TokenizerConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the checkpoint's run had another tokenizer. config: describes this run's."""
    try:
        require_compatible(point, {"tokenizer": tokenizer.fingerprint})
    except ConfigError as error:
        raise ConfigError("", error.message + _way_to_continue(config, point)) from None


def _way_to_continue(config: TokenizerConfig, point: ResumePoint) -> str:
    """Return what makes the tokenizer equal to that of a run that began before tokenizer.pattern existed, or ""."""
    if config.backend != "tiktoken" or config.pattern in ("", "llama3"):
        return ""
    earlier = load_tokenizer(replace(config, pattern="llama3"))
    if point.state.fingerprint.get("tokenizer") != earlier.fingerprint:
        return ""
    return '; or set tokenizer.pattern = "llama3", with which this run began, to continue it'
