"""Tokenizers and conversations shared by tests, and a readable form of encoded conversations."""

import sentencepiece

from trainer.base.config import TokenizerConfig
from trainer.data.tokenizer.backends import SentencePieceTokenizer, load_tokenizer

DEFAULT = load_tokenizer(TokenizerConfig())
CHATML_NAMES = {
    "<|im_start|>": "<|reserved_special_token_0|>",
    "<|im_end|>": "<|reserved_special_token_1|>",
}
CHATML = load_tokenizer(TokenizerConfig(reuse_reserved_tokens=CHATML_NAMES))
SYSTEM = {"role": "system", "content": " Be kind. "}
TALK = [
    SYSTEM,
    {"role": "user", "content": " Who? "},
    {"role": "assistant", "content": "I am."},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": " Yes"},
]


def train_sentencepiece(folder, model_type) -> SentencePieceTokenizer:
    """Train with the settings of Llama 2: no normalization, byte fallback, a space before every text."""
    texts = [f"[INST] the quick brown fox number {i} [/INST] <<SYS>> <</SYS>> a Lazy dog? " for i in range(200)]
    (folder / "text").write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / model_type),
        vocab_size=400,
        model_type=model_type,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return load_tokenizer(TokenizerConfig(backend="sentencepiece", path=str(folder / f"{model_type}.model")))


def shown(encoded, tokenizer=DEFAULT) -> list[str]:
    """Return each token as text, with a + before targets."""
    tokens, targets = encoded
    if isinstance(tokenizer, SentencePieceTokenizer):
        pieces = [tokenizer._processor.id_to_piece(t) for t in tokens]
    else:
        pieces = [tokenizer.decode([t]) for t in tokens]
    return [("+" if target else "") + piece for piece, target in zip(pieces, targets, strict=True)]
