"""The trained model speaks: its weights from a checkpoint or a folder of Hugging Face's, on one rank or cut over several."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from trainer.checkpoint.export import load_checkpoint_tokenizer, load_hf_tokenizer
from trainer.checkpoint.huggingface import CHAT_TEMPLATE, ModelMetadata
from trainer.checkpoint.weights import WeightSource, newest
from trainer.config import ConfigError
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.parallel.tensor import apply_tensor, retie, tied_names
from trainer.runtime.distributed import run_on_rank_0


class CachedAttention(nn.Module):
    """Attention of new tokens to themselves and to all before them, whose keys and values it keeps."""

    def __init__(self, kv_heads: int, longest: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.kept = torch.empty(2, 1, kv_heads, longest, head_dim, dtype=dtype, device=device)
        self.length = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        """q: (1, heads, new, head_dim); k, v: (1, kv heads, new, head_dim)."""
        start, self.length = self.length, self.length + k.shape[2]
        self.kept[:, :, :, start : self.length] = torch.stack((k, v))
        keys, values = self.kept[:, :, :, : self.length]
        new = q.shape[2]
        seen = None
        if new > 1 and start:  # is_causal would align the triangle with the first key
            seen = torch.ones(new, self.length, dtype=torch.bool, device=q.device).tril(start)
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, seen, is_causal=new > 1 and not start, enable_gqa=gqa)


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 0
    """Only among so many of the likeliest; 0: all."""
    top_p: float = 1.0
    """Only among the likeliest that have this probability together (Holtzman et al. 2020, arXiv:1904.09751)."""


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """logits: (vocabulary,), fp32, on the CPU, where the same seed gives the same on every device."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ordered, tokens = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        ordered, tokens = ordered[: sampling.top_k], tokens[: sampling.top_k]
    shares = ordered.softmax(0)
    before = shares.cumsum(0) - shares
    shares = shares.masked_fill(before >= sampling.top_p, 0.0)  # the first always stays
    return int(tokens[torch.multinomial(shares, 1, generator=generator)])


class TextGenerator:
    """A model that goes on with tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, longest: int, template: str):
        """On all ranks together, which cut the matrices between them. longest: tokens of prompt and answer; 0: as many as the
        model was trained with. template: of chats, "" for its own. Raises ConfigError."""
        folder = run_on_rank_0(partial(newest, folder))
        weights = WeightSource(folder)
        self.device = device
        self.tokenizer, self.template, trained_with = _text_side(folder, weights)
        self.template = template or self.template
        self.longest = longest or trained_with
        spec, sizes = weights.spec, weights.sizes
        plan, ranks = spec.plan(sizes), dist.get_world_size()
        for name in plan.tp_divisible:
            if getattr(sizes, name) % ranks:
                raise ConfigError("", f"{ranks} ranks must divide {name} {getattr(sizes, name)} of {folder}")
        with torch.device("meta"):
            self.network = spec.model(sizes).to(dtype)
        if ranks > 1:
            mesh = init_device_mesh(device.type, (ranks,))
            apply_tensor(self.network, plan, mesh, sequence_parallel=False, recompute_gathers=lambda block: False)
        tied = tied_names(self.network)
        self.network.to_empty(device=device).eval()
        retie(self.network, tied)
        weights.load_into(dict(self.network.named_parameters()))
        self.caches = []
        try:
            for block in self.network.get_submodule(plan.blocks).children():
                cache = CachedAttention(sizes.n_kv_heads // ranks, self.longest, sizes.head_dim, dtype, device)
                block.set_submodule(plan.attention, cache)
                self.caches.append(cache)
        except (RuntimeError, MemoryError):
            rule = f"there is not memory enough for the keys and values of {self.longest} tokens; --longest takes fewer"
            raise ConfigError("", rule) from None
        self.seen: list[int] = []
        """Tokens whose keys and values are kept."""

    def chat(self) -> ChatFormat:
        """Raises ConfigError where the model has no template."""
        if not self.template:
            raise ConfigError(
                "", "the model has no chat template; --template llama3 (llama2, chatml, a file) names one"
            )
        return load_chat_format(self.template, self.tokenizer)

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, stop: Collection[int], most: int
    ) -> Iterator[int]:
        """New tokens, up to `most`, to the longest that there is room for, or to one of `stop`, which is the last one given. What
        the prompt has in common with what was seen before is not computed again."""
        if len(prompt) >= self.longest:
            raise ConfigError(
                "", f"the prompt has {len(prompt)} tokens, and there is room for {self.longest} with the answer"
            )
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(min(most, self.longest - len(prompt))):
            token = sample(self._logits(tokens), sampling, generator)
            tokens.append(token)
            yield token
            if token in stop:
                return

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> Tensor:
        """(vocabulary of the tokenizer,), fp32, on the CPU: of the token behind these."""
        same = 0
        while same < min(len(self.seen), len(tokens) - 1) and self.seen[same] == tokens[same]:
            same += 1
        for cache in self.caches:
            cache.length = same
        new = torch.tensor([tokens[same:]], device=self.device)
        positions = torch.arange(same, len(tokens), device=self.device)[None]
        logits = self.network(new, positions, torch.zeros_like(new))
        self.seen = list(tokens)
        return logits[0, -1, : self.tokenizer.vocab_size].float().cpu()


class TextStream:
    """Tokens become text as they come: a letter of several tokens waits for its last one."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        """before: the last tokens ahead, which decide about a space at the beginning."""
        self.tokenizer = tokenizer
        self.tokens = list(before)
        self.told = len(tokenizer.decode(self.tokens)) if before else 0

    def put(self, token: int) -> str:
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if text.endswith("\ufffd"):
            return ""
        new, self.told = text[self.told :], len(text)
        return new

    def rest(self) -> str:
        return self.tokenizer.decode(self.tokens)[self.told :]


def _text_side(folder: Path, weights: WeightSource) -> tuple[Tokenizer, str, int]:
    """Tokenizer, chat template ("": none), and the tokens of a sample it was trained with."""
    own_template = str(folder / CHAT_TEMPLATE) if (folder / CHAT_TEMPLATE).exists() else ""
    if weights.theirs is None:
        model = ModelMetadata.read(folder)
        return load_checkpoint_tokenizer(folder, model), own_template, model.seq_len
    about = folder / "tokenizer_config.json"
    if not own_template and about.exists() and '"chat_template"' in about.read_text():
        own_template = str(about)
    return load_hf_tokenizer(folder), own_template, int(weights.theirs.config.get("max_position_embeddings", 2048))
