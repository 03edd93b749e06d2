"""Read exports with the package transformers of this interpreter. It needs nothing else of this project, so that
scripts/dev/check_exports.py can run it in the environment of an old version.

    python trainer/tools/testing/transformers_reader.py request.json reply.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def read_tokens(folder: str, strings: list[str], **options: Any) -> dict[str, Any]:
    """Return the class of a folder's tokenizer, the tokens of strings without special tokens, and those of the first string as a
    user gets them. options: of from_pretrained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    plain = tokenizer(strings, add_special_tokens=False, split_special_tokens=True).input_ids
    default = tokenizer(strings[0], split_special_tokens=True)
    return {"class": type(tokenizer).__name__, "tokens": plain, "default": default.input_ids, "keys": sorted(default)}


def read_model(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return logits in fp32, greedy tokens and the tokens of a chat."""
    options = {"attn_implementation": "eager", "torch_dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    prompt = request["prompts"][folder]
    tokens = list(prompt)
    with torch.no_grad():
        logits = model(torch.tensor(request["tokens"])).logits
        for _ in range(request["new_tokens"]):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
    chat = tokenizer(text, add_special_tokens=False).input_ids
    return {"logits": logits.tolist(), "greedy": tokens[len(prompt) :], "chat": chat}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Return version and results. request: strings, tokens, and the folders of which to read the tokenizer or the model."""
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {"version": transformers.__version__, "tokenizers": {}, "models": {}}
    for folder in request["tokenizers"]:
        results["tokenizers"][folder] = read_tokens(folder, request["strings"])
    for folder in request["models"]:
        model_type = json.loads((Path(folder) / "config.json").read_text())["model_type"]
        if model_type in transformers.CONFIG_MAPPING:
            results["models"][folder] = read_model(folder, request)
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(read(json.loads(Path(sys.argv[1]).read_text()))))
