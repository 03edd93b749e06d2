"""Read exports with llama.cpp through the package llama_cpp of this interpreter. It needs nothing else of this project.

python trainer/tools/testing/llama_cpp_reader.py request.json reply.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter


def load(file: str) -> llama_cpp.Llama:
    """Load a file with keys and values in fp32, as this project computes them."""
    options = {"n_ctx": 256, "logits_all": True, "flash_attn": False, "type_k": 0, "type_v": 0, "verbose": False}
    return llama_cpp.Llama(file, **options)


def tokens_of(model: llama_cpp.Llama, text: str, special: bool = False) -> list[int]:
    return model.tokenize(text.encode(), add_bos=False, special=special)


def read_model(model: llama_cpp.Llama, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
    """Return logits, greedy tokens and the tokens of a chat. prompt: of the greedy tokens."""
    length = int(model.metadata[f"{model.metadata['general.architecture']}.context_length"])
    logits = []
    for row in request["tokens"]:
        model.reset()
        model.eval(row[:length])
        logits.append(model.scores[: len(row[:length])].tolist())
    tokens = list(prompt)
    model.reset()
    model.eval(tokens)
    for _ in range(request["new_tokens"]):
        tokens.append(int(model.scores[len(tokens) - 1].argmax()))
        model.eval(tokens[-1:])
    template = model.metadata["tokenizer.chat_template"]
    ids = {"bos": model.token_bos(), "eos": model.token_eos()}
    names = {f"{role}_token": model.detokenize([i], special=True).decode() for role, i in ids.items()}
    chat = Jinja2ChatFormatter(template=template, **names)(messages=request["messages"])
    return {"logits": logits, "greedy": tokens[len(prompt) :], "chat": tokens_of(model, chat.prompt, special=True)}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Return version and results. request: strings, tokens, and the files of which to read the tokenizer or the model."""
    results: dict[str, Any] = {"version": llama_cpp.__version__, "tokenizers": {}, "models": {}}
    for file in request["tokenizers"]:
        model = load(file)
        results["tokenizers"][file] = {"tokens": [tokens_of(model, text) for text in request["strings"]]}
        if file in request["models"]:
            results["models"][file] = read_model(model, request["prompts"][file], request)
        model.close()
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(read(json.loads(Path(sys.argv[1]).read_text()))))
