"""Compare exports in every engine: tokens of strings with several tokenizers, logits, greedy tokens and a chat of every family.

Each family is exported with random weights, norms and biases included, once for each tokenizer: the shipped one, a trained rank
file, a sentencepiece model, and two folders in Hugging Face's format, of which one has Qwen's class. An engine runs in the
environment that an option names. Families that an engine does not know are listed; their tokens are compared too.

exit codes: 0: all tokens are equal, and the logits deviate by at most 1e-4; 1: they do not; 2: an argument is wrong

    python scripts/dev/check_exports.py
    python scripts/dev/check_exports.py --python old/bin/python --families qwen2.5 gemma3
    python scripts/dev/check_exports.py --llama-cpp env/bin/python --llama-source llama_cpp_python/vendor/llama.cpp
    python scripts/dev/check_exports.py --vllm env/bin/python
"""

import json
import os
import subprocess
import sys
import tempfile
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import torch
import torch.distributed as dist
from torch import Tensor

from models import MODELS
from models.decoder import Decoder
from scripts.dev.export_cases import SEQ_LEN, export, strings, write_tokenizers
from trainer.base.config import DataConfig, TokenizerConfig
from trainer.base.config.argument_types import positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.errors import ConfigError
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.gguf_writer import GgufExport
from trainer.data.prepare.encode import chat_format
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.runtime.distributed import init_process_group
from trainer.tools.testing.gguf_files import differences

NEW_TOKENS = 24
MESSAGES = [{"role": "user", "content": "What is 2 + 2? Größe 世界"}]
_LIMIT = 1e-4
"""Largest accepted deviation of a logit."""
_LIMITS = {("llama.cpp", "gemma2"): 3e-2, ("llama.cpp", "gemma3"): 3e-2, ("vLLM", "ministral3"): 0.3}
"""Engine and family -> limit. llama.cpp computes GELU with a table in fp16. vLLM does not multiply the queries at positions after
the original context window."""

_NOT_COMPUTED = {("vLLM", "phi"), ("vLLM", "deepseek-v3")}
"""Engine and family whose small models it cannot compute: LongRoPE and the width of the heads, on CPUs."""
_CONVERTED_WITH = {"gemma2": "sentencepiece"}
"""Family -> tokenizer with which llama.cpp's converter is called, because it reads no other kind. Otherwise: the first one."""
_OWN_KEYS = (
    *("general.", ".vocab_size", ".rope.dimension_count", ".attention.key_length", ".attention.value_length"),
    *(".context_length", ".rope.freq_base", ".rope.freq_base_swa", ".rope.scaling.attn_factor"),
    *(".rope.scaling.yarn_attn_factor", ".rope.scaling.yarn_beta_fast", ".rope.scaling.yarn_beta_slow"),
    *("ggml.add_eos_token", "ggml.add_sep_token", "ggml.add_space_prefix", "ggml.scores"),
)
"""Parts of the names of keys in which our files differ from the converter's on purpose (docs/models.md)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An export of a family with a tokenizer."""

    family: str
    tokenizer: str
    home: Path
    prompt: list[int]
    """Before the greedy tokens."""
    expected: dict[str, Any] = field(default_factory=dict)
    """Logits (2, seq, vocab), greedy tokens and tokens of a chat; empty if only the tokens of strings are compared."""
    refusal: str = ""
    """Why llama.cpp gets no file."""


def greedy(model: Decoder, prompt: list[int]) -> list[int]:
    """Return the tokens that follow."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def write_cases(
    families: list[str], configs: dict[str, TokenizerConfig], tokens: torch.Tensor, folder: Path, with_gguf: bool
) -> list[Case]:
    """Export every family with every tokenizer.

    Args:
        families: Names.
        configs: Tokenizers by name. The first one is that of the models.
        tokens: Input of the models, (2, seq).
        folder: For the files.
        with_gguf: Whether to write files for llama.cpp too.
    """
    chat = chat_format(DataConfig(), load_tokenizer(TokenizerConfig())).prompt(MESSAGES)
    cases = []
    for family in families:
        for i, (name, config) in enumerate(configs.items()):
            home, expected, refusal = folder / f"{family}-{i}", {}, ""
            model = export(family, config, home, with_template=i == 0)
            # All contexts need the long factors: transformers chooses them by each length, llama.cpp by the longest.
            prompt = tokens[0, : 33 if model.sizes.rope_type == "longrope" else 8].tolist()
            if i == 0:
                with torch.no_grad():
                    expected = {"logits": model(tokens), "greedy": greedy(model, prompt), "chat": chat}
            try:
                if with_gguf:
                    GgufExport.of(open_weights(home / "checkpoint", alone=True), "f32").write(home / "model.gguf")
            except ConfigError as error:
                refusal = error.message
            case = Case(family=family, tokenizer=name, home=home, prompt=prompt, expected=expected, refusal=refusal)
            cases.append(case)
    return cases


@dataclass(frozen=True)
class Engine:
    option: str
    """Names the interpreter of its environment."""
    script: str
    """Reads exports with it, in trainer/tools/testing."""
    file: str
    """What it reads beside a case's checkpoint."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of its environment."""


ENGINES = {
    "transformers": Engine("--python", "transformers_reader.py", "export"),
    "llama.cpp": Engine("--llama-cpp", "llama_cpp_reader.py", "model.gguf"),
    "vLLM": Engine(
        "--vllm",
        "vllm_reader.py",
        "export",
        # One process, and little memory for keys and values.
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    ),
}


def read(engine: Engine, python: str, cases: list[Case], request: dict[str, Any]) -> dict[str, Any]:
    """Return what an engine reads from the exports. Raises ConfigError.

    Args:
        engine: The engine.
        python: Interpreter of its environment.
        cases: Exports that it reads.
        request: Texts and tokens.
    """
    prompts = {str(case.home / engine.file): case.prompt for case in cases if case.expected}
    files = {"tokenizers": [str(case.home / engine.file) for case in cases], "models": [*prompts], "prompts": prompts}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("request.json", "reply.json")]
        paths[0].write_text(json.dumps(request | files))
        command = [python, str(ROOT / "trainer" / "tools" / "testing" / engine.script), *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | engine.variables)
        if done.returncode:
            raise ConfigError("", f"{engine.option} {python}: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(paths[1].read_text())


def compare(name: str, cases: list[Case], expected: dict[str, list], reply: dict[str, Any], tokens: Tensor) -> bool:
    """Print a line for each family. Return whether all that the engine has read agrees.

    Args:
        name: Of the engine.
        cases: Exports that it has read.
        expected: Tokenizer -> tokens of the strings.
        reply: Of the engine.
        tokens: Input of the models, (2, seq).
    """
    is_right, file = True, ENGINES[name].file
    for family in dict.fromkeys(case.family for case in cases):
        own, texts = [case for case in cases if case.family == family], []
        for case in own:
            found = reply["tokenizers"].get(str(case.home / file), {}).get("tokens", expected[case.tokenizer])
            count = sum(a != b for a, b in zip(found, expected[case.tokenizer], strict=True))
            texts += [f"{count} strings differ ({case.tokenizer})"] if count else []
        is_right &= not texts
        if reply["tokenizers"] and not texts:
            texts = ["tokens are equal"]
        text, model_is_right = _compare_model(name, own[0], reply, tokens)
        print(f"{name}, {family}: {'; '.join([*texts, text])}", flush=True)
        is_right &= model_is_right
    return is_right


def _compare_model(name: str, case: Case, reply: dict[str, Any], tokens: Tensor) -> tuple[str, bool]:
    """Return a text about a model, and whether it is right."""
    path = str(case.home / ENGINES[name].file)
    if path not in reply["models"]:
        problem = reply.get("problems", {}).get(path)
        is_known = problem is None or (name, case.family) in _NOT_COMPUTED
        return problem or "its models are unknown to this version", is_known
    found, logits = reply["models"][path], case.expected["logits"]
    what = "logits" if "logits" in found else "logprobs"
    values = torch.tensor(found[what])
    if what == "logprobs":
        logits = logits.log_softmax(-1)[:, :-2].gather(-1, tokens[:, 1:-1, None])[..., 0]
    deviation = (values - logits[:, : values.shape[1]]).abs().max().item()
    equal = {kind: found[kind] == case.expected[kind] for kind in ("greedy", "chat")}
    texts = [f"{'equal' if is_equal else 'other'} {kind} tokens" for kind, is_equal in equal.items()]
    is_right = deviation <= _LIMITS.get((name, case.family), _LIMIT) and all(equal.values())
    return f"{what} deviate by {deviation:.0e}, {', '.join(texts)}", is_right


def compare_with_converter(python: str, source: Path, cases: list[Case]) -> bool:
    """Print in which keys and tensors our files differ from those of llama.cpp's converter. Return whether all tensors are equal,
    and all keys but _OWN_KEYS.

    Args:
        python: Interpreter of an environment with the packages of the converter.
        source: Folder of llama.cpp's source.
        cases: Exports.
    """
    is_right = True
    for case in cases:
        tokenizer = _CONVERTED_WITH.get(case.family, cases[0].tokenizer)
        if case.tokenizer != tokenizer or case.refusal:
            continue
        out = case.home / "reference.gguf"
        command = [python, str(source / "convert_hf_to_gguf.py"), str(case.home / "export"), "--outtype", "f32"]
        done = subprocess.run([*command, "--outfile", str(out)], capture_output=True, text=True, env=os.environ)
        if done.returncode:
            print(f"converter, {case.family}: {done.stderr.strip().splitlines()[-1]}")
            is_right = False
            continue
        keys, tensors = differences(case.home / "model.gguf", out)
        print(f"converter, {case.family}: {', '.join(tensors) or 'tensors are equal'}; other keys: {', '.join(keys)}")
        is_right &= not tensors and all(any(own in key for own in _OWN_KEYS) for key in keys)
    return is_right


def check(args: Any, folder: Path) -> bool:
    """Compare all engines that the arguments name. Return whether they agree."""
    configs, texts = write_tokenizers(folder), strings(args.strings)
    tokens = torch.randint(1000, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    cases = write_cases(args.families, configs, tokens, folder, bool(args.llama_cpp or args.llama_source))
    request = {"tokens": tokens.tolist(), "new_tokens": NEW_TOKENS, "messages": MESSAGES}
    tokenizers = {name: load_tokenizer(config) for name, config in configs.items()}
    pythons = {"transformers": args.python, "llama.cpp": args.llama_cpp, "vLLM": args.vllm}
    is_right = True
    for name, engine in ENGINES.items():
        if not (python := pythons[name]):
            print(f"{name}: not compared; {engine.option} names the interpreter of its environment")
            continue
        own, readable = texts, cases
        if name == "llama.cpp":
            own = [unicodedata.normalize("NFC", text) for text in texts]  # it does not normalize
            readable = [case for case in cases if not case.refusal]
        for case in cases:
            if case not in readable and case.expected:
                print(f"{name}, {case.family}: {case.refusal}")
        reply = read(engine, python, readable, request | {"strings": own})
        expected = {tokenizer: [loaded.encode(text) for text in own] for tokenizer, loaded in tokenizers.items()}
        print(f"{name} {reply['version']}, {len(own)} strings, tokenizers: {', '.join(configs)}")
        is_right &= compare(name, readable, expected, reply, tokens)
    if args.llama_source:
        is_right &= compare_with_converter(args.llama_cpp or sys.executable, args.llama_source, cases)
    return is_right


def main() -> None:
    parser = Arguments(__doc__)
    python_help = "interpreter of the environment with transformers (default: this one)"
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help=python_help)
    parser.add_argument("--llama-cpp", metavar="PATH", help="interpreter of the environment with llama-cpp-python")
    parser.add_argument("--vllm", metavar="PATH", help="interpreter of the environment with vllm-cpu")
    source_help = "folder of llama.cpp's source, whose converter's files are compared with ours"
    parser.add_argument("--llama-source", type=Path, metavar="PATH", help=source_help)
    parser.add_argument(
        "--families", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME", help="names"
    )
    parser.add_argument("--strings", type=positive_int, default=2000, metavar="N", help="number of strings")
    args = parser.parse_args()
    init_process_group(load_config([]).distributed, torch.device("cpu"))
    try:
        with tempfile.TemporaryDirectory(prefix="exports-") as folder:
            is_right = check(args, Path(folder))
    finally:
        dist.destroy_process_group()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    run_to_end(main)
