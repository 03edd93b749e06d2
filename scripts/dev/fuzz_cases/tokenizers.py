"""Files of tokenizers. An accepted tokenizer has consistent ids, and byte-level tokenizers decode to the text."""

import json
from pathlib import Path
from random import Random

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.dev.fuzz_cases.damage import SAMPLES, TEXTS, damage_bytes, damage_file, damage_json_file, require
from trainer.config import ConfigError, TokenizerConfig
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer

_CORPUS = [text for text in SAMPLES for _ in range(20)]


def make_fixtures(folder: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    ranks = DEFAULT_FILE.read_bytes().splitlines(keepends=True)
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(ranks[:300]))


def run(random: Random, fixtures: Path, folder: Path) -> str:
    backend, name = random.choice(
        (("tiktoken", "tokenizer.tiktoken"), ("sentencepiece", "tokenizer.model"), ("huggingface", "tokenizer.json"))
    )
    files = [name, "tokenizer_config.json"] if backend == "huggingface" else [name]
    for file in files:
        (folder / file).write_bytes((fixtures / file).read_bytes())
    damaged = random.random() < 0.8
    path = folder / random.choice(files)
    if damaged and path.suffix == ".json":
        damage_json_file(random, path)
    elif damaged and random.random() < 0.1:
        damage_file(random, path)
    elif damaged:
        for _ in range(random.choice((1, 1, 3))):
            path.write_bytes(damage_bytes(random, path.read_bytes()))
    extra = tuple(random.sample(("<a>", "<s>", "<|eot_id|>", *TEXTS), random.choice((0, 0, 0, 1, 2))))
    reuse = (
        {random.choice(TEXTS): random.choice(("<|reserved_special_token_0|>", *TEXTS))} if random.random() < 0.1 else {}
    )
    reuse = reuse if backend == "tiktoken" else {}
    config = TokenizerConfig(
        backend=backend, path=str(folder / name), extra_special_tokens=extra, reuse_reserved_tokens=reuse
    )
    try:
        tokenizer = load_tokenizer(config)
    except ConfigError as error:
        require(damaged or extra or reuse, f"an intact tokenizer was refused: {error}")
        raise
    size = tokenizer.vocab_size
    ends = {*tokenizer.prefix, tokenizer.eos, tokenizer.eos if tokenizer.bos is None else tokenizer.bos}
    require(all(0 <= token < size for token in ends), "BOS or EOS is out of range")
    require(all(0 <= token < size for token in tokenizer.special_tokens.values()), "a special token is out of range")
    require(len(tokenizer.text_bytes()) == size, "text_bytes has another length than the vocabulary")
    tokenizer.huggingface_files()
    for text in SAMPLES:
        tokens = tokenizer.encode(text)
        require(
            tokens == tokenizer.encode(text) == tokenizer.encode_array(text).tolist(), "encoding is not deterministic"
        )
        require(
            all(0 <= token < size for token in tokens), f"{text!r} is encoded as {tokens}, but there are {size} tokens"
        )
        decoded = tokenizer.decode(tokens)
        require(isinstance(decoded, str), "decoding returns no text")
        byte_level = backend == "tiktoken" or (backend == "huggingface" and not damaged)
        require(not byte_level or decoded == text, f"{text!r} is decoded as {decoded!r}")
    tokenizer.decode(list(range(size)))
    return ""
