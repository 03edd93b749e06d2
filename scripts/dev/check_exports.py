"""Compare exports with the package transformers: tokens of strings with several tokenizers, and logits of every family.

Each family is exported with random weights, norms and biases included, once for each tokenizer: the shipped one, a trained rank
file, a sentencepiece model, and two folders in Hugging Face's format, of which one has Qwen's class. The environment of --python
needs torch, transformers and tokenizers. Families that its version does not know are listed; their tokens are compared too.

exit codes: 0: all tokens are equal, and the logits deviate by at most 1e-4; 1: they do not; 2: an argument is wrong

    python scripts/dev/check_exports.py
    python scripts/dev/check_exports.py --python old/bin/python --families qwen2.5 gemma3
"""

import base64
import json
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt
from trainer.tools.testing.random_parameters import randomize

if __name__ == "__main__":
    exit_on_interrupt()

import sentencepiece
import tokenizers
import torch
import torch.distributed as dist

from models import MODELS
from models.decoder import Decoder
from models.spec import saved_weights
from scripts.train_tokenizer import train
from trainer.base.config import TokenizerConfig
from trainer.base.config.argument_types import positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.errors import ConfigError
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.native_writer import write_tensors
from trainer.checkpoint.tensor_files import TensorWrite
from trainer.data.tokenizer.backends import NUM_SPECIAL, load_tokenizer
from trainer.data.tokenizer.byte_pair import PATTERNS
from trainer.run.resolve import resolve
from trainer.run.run_folder import model_files
from trainer.run.text_format import load_text_format
from trainer.runtime.distributed import init_process_group

SEQ_LEN = 48  # more than the windows of the debug sizes, and than the context from which their encodings are extended
LIMIT = 1e-4
"""Largest accepted deviation of a logit."""
_GIB = 2**30
_SMALL = {"dim": 128, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 352, "vocab_size": 2048}
_PUBLISHED = {"llama2": "7b", "llama3.1": "8b", "llama3.2": "1b"}
"""Families without a debug size -> size that is made smaller."""


# ---------------------------------------------------------------- strings

_TEXTS = (
    "the quick brown fox isn't We'RE I'll 1234567 89 3.14159 1,000,000 0x00FF 2nd",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n\n\tif x == 10:\n\t\tpass\r\n",
    '{"key": [1, 2.0, null], "a b": {"c": "d\\n"}}',
    "Größe façade Łódź Привет мир 世界和平 カタカナ 한국어 مرحبا שלום नमस्ते ไทย e\u0301 a\u0308",
    "🙂👍🏽👨\u200d👩\u200d👧 \U0001d518\U0001d52b ﬁ ½ Ⅳ ① ٣ १२३ \u00a0\u3000\u200b\ufeff\u2028",
    "<|begin_of_text|> <|end_of_text|><|im_start|>user\n<s></s> <unk> <0x0A> [INST] <|endoftext|>",
    "  two  spaces   at both ends  ",
    "!!!...???---___***///\\\\\\ $x_1^2 + y$ @name #tag https://a.b/c?d=e&f=g%20h",
)


def strings(count: int) -> list[str]:
    """Return texts of many scripts, code, white space, numbers, and names of special tokens."""
    draw, result = random.Random(0), ["plain text"]
    while len(result) < count:
        kind = draw.randrange(5)
        words = draw.choice(_TEXTS).split(" ")
        if kind < 3:
            start = draw.randrange(len(words))
            text = draw.choice((" ", "  ", "\n", "")).join(words[start:] + draw.choice(_TEXTS).split(" ")[:start])
        elif kind == 3:
            text = draw.choice(" \n\t-=.0a世") * draw.choice((1, 2, 3, 5, 40)) + draw.choice(words)
        else:
            text = "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0xA0, 0x3000)))) for _ in range(9))
            text = "".join(c for c in text if unicodedata.category(c) != "Cn")
        result.append(draw.choice(("", " ")) + text + draw.choice(("", " ", "\n")))
    return result


# ---------------------------------------------------------------- tokenizers


def write_tokenizers(folder: Path) -> dict[str, TokenizerConfig]:
    """Return name -> tokenizer. Their files are written to the folder."""
    texts = strings(400)
    ranks = folder / "trained.tiktoken"
    tokens = train(iter(texts), 1500 - NUM_SPECIAL)
    ranks.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.split("\n") if line]),
        model_prefix=str(folder / "llama"),
        model_type="bpe",
        vocab_size=1200,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        # as in Llama 2's model
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
    )
    model = TokenizerConfig(backend="sentencepiece", path=str(folder / "llama.model"))
    llama = folder / "llama"
    files = load_tokenizer(model).huggingface_files()
    config = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    _write(llama, files | {"tokenizer_config.json": json.dumps(config).encode()})
    return {
        "shipped": TokenizerConfig(),
        "trained": TokenizerConfig(backend="tiktoken", path=str(ranks)),
        "sentencepiece": model,
        "llama folder": TokenizerConfig(backend="huggingface", path=str(llama)),
        "qwen folder": TokenizerConfig(backend="huggingface", path=str(_write_qwen(folder / "qwen", texts))),
    }


def _write_qwen(folder: Path, texts: list[str]) -> Path:
    """Write a tokenizer with the class and the pattern of Qwen's, and with special tokens and others in its vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS["qwen2"]), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, **names}
    _write(
        folder, {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    )
    return folder


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


# ---------------------------------------------------------------- exports


def export(family: str, tokenizer: TokenizerConfig, folder: Path) -> Decoder:
    """Export a small model of a family with random parameters to folder/export, and return it. A process group must exist."""
    words = ["--model.name", family, "--model.size", _PUBLISHED.get(family, "debug")]
    overrides = _SMALL if family in _PUBLISHED else {}
    words += [word for name, value in overrides.items() for word in (f"--model.overrides.{name}", str(value))]
    words += ["--training.seq_len", str(SEQ_LEN), "--tokenizer.backend", tokenizer.backend]
    config = load_config([*words, "--tokenizer.path", tokenizer.path])
    resolved = resolve(config, 1)
    model = resolved.spec.model(resolved.sizes)
    randomize(model)

    def pieces(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        yield parameter.detach()

    entries = [
        TensorWrite(f"model/{name}", parameter.dtype, tuple(parameter.shape), partial(pieces, parameter))
        for name, parameter in saved_weights(model).items()
    ]
    files = model_files(config, resolved, load_text_format(config, resolved), {}, None, None)
    write_tensors(folder / "checkpoint", entries, files, _GIB, "random parameters")
    write_huggingface(open_weights(folder / "checkpoint", alone=True), folder / "export", torch.float32, _GIB)
    return model


def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens)


def compare(python: str, families: list[str], num_strings: int, folder: Path) -> bool:
    """Print a line for each family. Return whether all tokens and logits agree. python: interpreter with transformers."""
    tokenizers_ = write_tokenizers(folder)
    texts = strings(num_strings)
    tokens = torch.randint(1000, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    exports, logits = {}, {}
    for family in families:
        for i, (name, config) in enumerate(tokenizers_.items()):
            home = folder / f"{family}-{i}"
            model = export(family, config, home)
            exports[str(home / "export")] = family, name
            if i == 0:
                logits[str(home / "export")] = logits_of(model, tokens)
    request, reply = folder / "request.json", folder / "reply.json"
    content = {"strings": texts, "tokens": tokens.tolist(), "tokenizers": [*exports], "models": [*logits]}
    request.write_text(json.dumps(content))
    script = ROOT / "trainer" / "tools" / "testing" / "transformers_reader.py"
    done = subprocess.run([python, str(script), str(request), str(reply)], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError("", f"--python {python}: {done.stderr.strip().splitlines()[-1]}")
    read = json.loads(reply.read_text())
    expected = {name: [load_tokenizer(config).encode(text) for text in texts] for name, config in tokenizers_.items()}
    print(f"transformers {read['version']}, {len(texts)} strings, tokenizers: {', '.join(tokenizers_)}")
    return all([_report(family, exports, logits, expected, read) for family in families])


def _report(family: str, exports: dict, logits: dict, expected: dict, read: dict) -> bool:
    different, deviation = {}, "its models are unknown to this version"
    is_right = True
    for path, (other, name) in exports.items():
        if other == family:
            found = read["tokenizers"][path]["tokens"]
            count = sum(a != b for a, b in zip(found, expected[name], strict=True))
            different |= {name: count} if count else {}
            if path in logits and path in read["models"]:
                error = (torch.tensor(read["models"][path]) - logits[path]).abs().max().item()
                deviation = f"logits deviate by {error:.0e}"
                is_right = error <= LIMIT
    wrong = ", ".join(f"{count} strings differ ({name})" for name, count in different.items())
    print(f"{family}: {wrong or 'tokens are equal'}; {deviation}", flush=True)
    return is_right and not different


def main() -> None:
    parser = Arguments(__doc__)
    python_help = "interpreter of the environment with transformers"
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help=python_help)
    parser.add_argument(
        "--families", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME", help="names"
    )
    parser.add_argument("--strings", type=positive_int, default=2000, metavar="N", help="number of strings")
    args = parser.parse_args()
    init_process_group(load_config([]).distributed, torch.device("cpu"))
    try:
        with tempfile.TemporaryDirectory(prefix="exports-") as folder:
            is_right = compare(args.python, args.families, args.strings, Path(folder))
    finally:
        dist.destroy_process_group()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    run_to_end(main)
