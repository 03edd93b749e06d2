"""Text generation with the model of a checkpoint or a Hugging Face folder. Several ranks use tensor parallelism."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from models.components import CausalMask, attention_kernel, visible_keys
from models.context import Context
from models.spec import LayerKind, Structure
from trainer.base.config import ConfigError
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.checkpoint.formats.folders import metadata_and_generation, open_weights
from trainer.checkpoint.formats.model_metadata import ids_of_ends
from trainer.checkpoint.formats.tokenizer_files import load_model_tokenizer
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.load import build_model
from trainer.parallel.tensor import apply_tensor
from trainer.runtime.distributed import run_on_rank_0


class CachedAttention(nn.Module):
    """Causal attention with a KV cache: new tokens attend to themselves and to cached tokens. The cache of a layer with a window
    contains at most twice as many tokens as the window."""

    def __init__(
        self, kind: LayerKind, kv_heads: int, max_seq_len: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        """width: number of values of a token and a kv head: of its key and of its value together."""
        super().__init__()
        self.kernel, self.window = attention_kernel(kind), kind.window or max_seq_len
        # Twice the window: its tokens move to the start only when the cache is full.
        size = min(max_seq_len, 2 * self.window)
        self.kv_cache = torch.empty(1, kv_heads, size, width, dtype=dtype, device=device)
        self.first = self.end = 0
        """Position of the first cached token, and the position after the last."""

    def truncate(self, length: int) -> bool:
        """Remove the tokens from position `length` on. Return False, and remove all, if the cache lacks tokens that the token at
        this position attends to."""
        is_complete = self.first <= max(0, length - self.window + 1)
        self.end = length if is_complete else 0
        self.first = self.first if is_complete else 0
        return is_complete

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None, sinks: Tensor | None = None) -> Tensor:
        """Append the new keys and values to the cache. Return the result of attention, (1, heads, new tokens, head_dim).

        Args:
            q: (1, heads, new tokens, head_dim).
            k: (1, kv heads, new tokens, head_dim).
            v: (1, kv heads, new tokens, head_dim).
            sinks: (heads,), in kinds of layers with sinks.
        """
        k, v = self._append(torch.cat((k, v), -1)).split((k.shape[-1], v.shape[-1]), -1)
        rows, columns = q.shape[2], k.shape[2]
        if rows == 1:  # it needs no mask
            return self.kernel(q, k[:, :, -self.window :], v[:, :, -self.window :], None, sinks)
        is_masked = columns > rows or columns > self.window
        mask = visible_keys(rows, columns, self.window, q.device) if is_masked else None
        return self.kernel(q, k, v, mask, sinks)

    def _append(self, new: Tensor) -> Tensor:
        """Cache new tokens. Return all tokens that were cached, followed by the new ones, (1, kv heads, tokens, width)."""
        used, size = self.end - self.first, self.kv_cache.shape[2]
        total = used + new.shape[2]
        self.end += new.shape[2]
        if total <= size:
            self.kv_cache[:, :, used:total] = new
            return self.kv_cache[:, :, :total]
        kv = torch.cat((self.kv_cache[:, :, :used], new), dim=2)
        self.kv_cache[:, :, : self.window] = kv[:, :, -self.window :]
        self.first = self.end - self.window
        return kv


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. They are applied in the order of the fields."""

    temperature: float = 0.8
    """Divisor of the logits. 0 selects the most likely token."""
    top_k: int = 0
    """Number of most likely tokens from which the next token is sampled. 0 disables this filter."""
    top_p: float = 1.0
    """Total probability of the most likely tokens from which the next is sampled (Holtzman et al. 2020, arXiv:1904.09751)."""


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a token. logits: fp64, shape (vocabulary,), on the CPU so that the random numbers do not depend on the device."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / sampling.temperature  # at most 0, so that a low temperature cannot overflow
    ordered, tokens = scaled.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered, tokens = ordered[: sampling.top_k], tokens[: sampling.top_k]
    probs = ordered.softmax(0)
    preceding = probs.cumsum(0) - probs
    probs = probs.masked_fill(preceding >= sampling.top_p, 0.0)  # this never removes the first token
    return int(tokens[torch.multinomial(probs, 1, generator=generator)])


class TextGenerator:
    """A loaded model with its tokenizer and KV cache."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        caches: Sequence[CachedAttention],
        tokenizer: Tokenizer,
        device: torch.device,
        stop: Collection[int],
        chat_template: str,
        max_seq_len: int,
    ):
        """Describe a generator.

        Args:
            folder: Checkpoint or model folder, which messages name.
            model: Its kernels of attention are `caches`, so each forward appends tokens to them. `load_model` returns a model
                without caches.
            caches: Caches of all layers.
            tokenizer: Tokenizer of prompts and answers.
            device: Device of the model.
            stop: Tokens that end a text: EOS, and those in the model's generation_config.json.
            chat_template: Name or file of a chat template, or "" if the model has none.
            max_seq_len: Maximum total number of tokens in the prompt and the answer.
        """
        self.folder = folder
        self._model, self._caches = model, caches
        self.tokenizer = tokenizer
        self.device = device
        self.stop = frozenset(stop)
        self.chat_template = chat_template
        self.max_seq_len = max_seq_len
        self.cached_tokens: list[int] = []

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        max_seq_len: int,
        chat_template: str,
        base: Path | None = None,
        averaged: bool = False,
    ) -> "TextGenerator":
        """Load the model and shard its matrices over all ranks, collectively.

        Args:
            folder: Checkpoint, run folder, or model folder in Hugging Face's format.
            dtype: Type of the parameters and of the cache.
            device: Device of this rank.
            max_seq_len: Maximum total number of tokens in the prompt and the answer. 0: the sequence length used in training.
            chat_template: Name or file of a chat template, or "" for the model's own template.
            base: See open_weights.
            averaged: See open_weights.

        Raises:
            ConfigError: The model cannot be loaded, or the KV cache does not fit into memory.
        """
        folder = run_on_rank_0(partial(resolve_checkpoint, folder))
        weights = open_weights(folder, base, averaged=averaged)
        tokenizer, max_seq_len = load_model_tokenizer(weights), max_seq_len or weights.model.seq_len
        sizes, ranks = weights.sizes.for_seq_len(max_seq_len), dist.get_world_size()

        def shard(model: nn.Module) -> None:
            structure = model.structure()
            for name in structure.tp_divisible:
                if getattr(sizes, name) % ranks:
                    message = f"the number of ranks, {ranks}, must divide {name} {getattr(sizes, name)} of {folder}"
                    raise ConfigError("", message)
            if ranks > 1:
                mesh = init_device_mesh(device.type, (ranks,))
                apply_tensor(model, structure, mesh, sequence_parallel=False, recompute_gathers=())

        model = build_model(weights, sizes, dtype, device, shard)
        caches = _add_caches(model, model.structure(), sizes, max_seq_len, ranks, dtype, device)
        stop = {tokenizer.eos, *ids_of_ends(metadata_and_generation(folder)[1])}
        chat_template = chat_template or str(weights.template_file() or "")
        return cls(folder, model, caches, tokenizer, device, stop, chat_template, max_seq_len)

    def chat_format(self) -> ChatFormat:
        """Return the chat format that the template defines. Raises ConfigError if the model has no chat template."""
        if not self.chat_template:
            names = f"{', '.join(BUILT_IN)} or a file"
            raise ConfigError("", f"the model has no chat template; choose one with --chat-template ({names})")
        return load_chat_format(self.chat_template, self.tokenizer)

    def text_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text to continue, as those of a document in training. Raises ConfigError if there are none."""
        prompt = [*self.tokenizer.prefix, *self.tokenizer.encode(text)]
        if not prompt:
            message = (
                "--prompt: must not be empty, because the tokenizer adds no BOS token, so that the model has no input"
            )
            raise ConfigError("", message)
        return prompt

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, stop: Collection[int], max_new_tokens: int
    ) -> Iterator[int]:
        """Yield new tokens. Generation ends after `max_new_tokens` tokens, at the end of the context window, or after a token in
        `stop`, which is also yielded. If the prompt begins with cached tokens, these are not recomputed."""
        if len(prompt) >= self.max_seq_len:
            message = f"the prompt has {len(prompt)} tokens; prompt and answer share a context window of"
            raise ConfigError("", f"{message} {self.max_seq_len} tokens (--max-seq-len)")
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(min(max_new_tokens, self.max_seq_len - len(prompt))):
            token = sample(self._next_logits(tokens), sampling, generator)
            tokens.append(token)
            yield token
            if token in stop:
                return

    @torch.no_grad()
    def _next_logits(self, tokens: list[int]) -> Tensor:
        """Return the logits of the next token, shape (tokenizer.vocab_size,), fp64, on the CPU. Raises ConfigError if a logit is
        non-finite."""
        start = 0
        while start < min(len(self.cached_tokens), len(tokens) - 1) and self.cached_tokens[start] == tokens[start]:
            start += 1
        if not all([cache.truncate(start) for cache in self._caches]):
            start = 0
            for cache in self._caches:
                cache.truncate(0)
        new = torch.tensor([tokens[start:]], device=self.device)
        logits = self._model(new, Context.of(new, first_position=start))
        self.cached_tokens = list(tokens)
        logits = logits[0, -1, : self.tokenizer.vocab_size].double().cpu()
        if not logits.isfinite().all():
            raise ConfigError("", f"{self.folder}: the model returns non-finite logits, so it cannot generate text")
        return logits


def _add_caches(
    model: nn.Module,
    structure: Structure,
    sizes: Any,
    max_seq_len: int,
    ranks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[CachedAttention]:
    """Replace the kernels of attention by kernels with a KV cache, and return these. Raises ConfigError if memory is lacking."""
    caches = []
    try:
        for name in structure.kinds:  # the kernels know which keys are visible
            model.set_submodule(f"{structure.masks}.{name}", CausalMask(None))
        blocks = model.get_submodule(structure.blocks_path).children()
        for block, kind in zip(blocks, structure.layer_kinds, strict=True):
            shape = sizes.n_kv_heads // ranks, max_seq_len, sum(sizes.head_widths)
            cache = CachedAttention(structure.kinds[kind], *shape, dtype, device)
            block.set_submodule(structure.attention, cache)
            caches.append(cache)
    except (RuntimeError, MemoryError):
        message = f"not enough memory for a KV cache of {max_seq_len} tokens; lower --max-seq-len"
        raise ConfigError("", message) from None
    return caches


class TextStream:
    """Incremental decoding. A character that consists of several tokens is returned with the last of these tokens."""

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int] = ()):
        """prefix: the preceding tokens, which decide whether the text begins with a space."""
        self.tokenizer = tokenizer
        self.tokens = list(prefix)
        self.printed = len(tokenizer.decode(self.tokens)) if prefix else 0
        """Number of characters already returned."""

    def put(self, token: int) -> str:
        """Add a token and return the characters that it completes."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if text.endswith("\ufffd"):
            return ""
        new, self.printed = text[self.printed :], len(text)
        return new

    def rest(self) -> str:
        return self.tokenizer.decode(self.tokens)[self.printed :]
