"""The benchmark of generation: texts in batches of several sizes."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.llama import llama
from scripts.dev.peers import MODELS
from trainer.inference.engine import Sampling, TextRequest, generate
from trainer.inference.kv_cache import KvCache
from trainer.runtime.device import DTYPES
from trainer.tools.testing.layouts import Table

NEW_TOKENS = 64
PROMPT_LENGTHS = 16, 64
"""Shortest and longest prompt."""


@dataclass
class _NoText:
    """A tokenizer whose texts are empty."""

    vocab_size: int

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


def print_generation(model: str, batch: int, threads: int, repeats: int, dtype: str) -> None:
    """Print the new tokens per second of greedy answers to prompts of several lengths, one at a time and in a batch.

    Args:
        model: Name of the model, whose weights are random.
        batch: Number of texts.
        threads: Of the CPU.
        repeats: Turns. The ways take turns, and the table shows medians.
        dtype: Of parameters and cache, "fp32" or "bf16".
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes = MODELS[model][1]
    network = llama(sizes).to(DTYPES[dtype]).eval()
    for parameter in network.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    cache = KvCache(network, network.structure(), sizes, DTYPES[dtype], max_seq_len=512)
    lengths = torch.linspace(*PROMPT_LENGTHS, batch).long().tolist()
    prompts = [torch.randint(sizes.vocab_size, (length,)).tolist() for length in lengths]
    requests = [TextRequest(prompt=p, sampling=Sampling(temperature=0), max_new_tokens=NEW_TOKENS) for p in prompts]
    rates: dict[int, list[float]] = {1: [], batch: []}
    answers = {}
    for turn in range(repeats + 1):
        for cache.max_rows, of_turns in rates.items():
            start = time.perf_counter()
            answers[cache.max_rows] = generate(requests, cache, _NoText(sizes.vocab_size))
            if turn:  # the first turn is a warm-up
                of_turns.append(batch * NEW_TOKENS / (time.perf_counter() - start))
    table = Table(batch=">5", tokens_per_second=">17", min_to_max=">19", of_single=">9", equal_texts=">11")
    for rows, of_turns in rates.items():
        median = statistics.median(of_turns)
        ratio = median / statistics.median(rates[1])
        equal = sum(a == b for a, b in zip(answers[rows], answers[1], strict=True))
        spread = f"{min(of_turns):,.1f} - {max(of_turns):,.1f}"
        table.row(rows, f"{median:,.1f}", spread, f"{ratio:.2f}", f"{equal} of {batch}")
