"""How the texts of a run become tokens: its tokenizer and its chat template."""

from dataclasses import dataclass, replace

from trainer.checkpoint.resume import ResumePoint, require_compatible
from trainer.config import Config, ConfigError, TokenizerConfig
from trainer.data.datasets import dataset_configs
from trainer.data.prepare.encode import CHAT_DATASETS, chat_format
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.run.resolve import ResolvedRun
from trainer.runtime.distributed import run_on_rank_0
from trainer.system import console


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


def require_same_tokenizer(saved: ResumePoint, config: TokenizerConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the checkpoint's run had another tokenizer. config: describes this run's."""
    try:
        require_compatible(saved, {"tokenizer": tokenizer.fingerprint})
    except ConfigError as error:
        raise ConfigError("", error.message + _way_to_continue(config, saved)) from None


def _way_to_continue(config: TokenizerConfig, saved: ResumePoint) -> str:
    """Return what makes the tokenizer equal to that of a run that began before tokenizer.pattern existed, or ""."""
    if config.backend != "tiktoken" or config.pattern in ("", "llama3"):
        return ""
    earlier = load_tokenizer(replace(config, pattern="llama3"))
    if saved.state.fingerprint.get("tokenizer") != earlier.fingerprint:
        return ""
    return '; or set tokenizer.pattern = "llama3", with which this run began, to continue it'
