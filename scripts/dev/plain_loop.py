"""A training loop around the model and nothing else: the baseline of benchmark.py. It imports no part of the trainer."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.llama import LlamaSizes, llama

LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


def rows(tokens_file: Path, seq: int, batch: int) -> Iterator[Tensor]:
    """Yield the samples of each step, (batch, seq + 1)."""
    tokens = torch.from_numpy(np.load(tokens_file).astype(np.int64))
    samples = tokens[:-1].unflatten(0, (-1, seq))
    samples = torch.cat((samples, samples.roll(-1, 0)[:, :1]), 1)  # with the first token of the next sample
    for step in range(len(samples) // batch - 1):
        yield samples[step * batch : (step + 1) * batch]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def cross_entropy(model: nn.Module, row: Tensor) -> Tensor:
    """Return the mean loss of (batch, seq + 1) tokens."""
    tokens = row[:, :-1]
    logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), row[:, 1:].flatten())


def main() -> None:
    """Train and print each loss. Command-line arguments: tokens.npy, a JSON file of the sizes, batch, seq, threads."""
    tokens_file, sizes_file, *numbers = sys.argv[1:]
    batch, seq, threads = map(int, numbers)
    torch.set_num_threads(threads)
    model = llama(LlamaSizes(**json.loads(Path(sizes_file).read_text())))
    optimizer = adamw(model.parameters())
    for step, row in enumerate(rows(Path(tokens_file), seq, batch), start=1):
        loss = cross_entropy(model, row)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} | loss {loss.item():.4f}", flush=True)
