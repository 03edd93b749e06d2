"""Text generation with the model of a checkpoint or a Hugging Face folder. Several ranks use tensor parallelism."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.base.config import ConfigError
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.checkpoint.formats.folders import metadata_and_generation, open_weights
from trainer.checkpoint.formats.model_metadata import ids_of_ends
from trainer.checkpoint.formats.tokenizer_files import load_model_tokenizer
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tasks.encode import Request
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.engine import Answer, TextRequest, generate
from trainer.inference.kv_cache import KvCache
from trainer.inference.load import build_model
from trainer.inference.scores import score_continuations
from trainer.parallel.tensor import apply_tensor
from trainer.runtime.distributed import run_on_rank_0


class TextGenerator:
    """A loaded model with its tokenizer and KV cache."""

    def __init__(
        self,
        folder: Path,
        cache: KvCache,
        tokenizer: Tokenizer,
        stop: Collection[int],
        chat_template: str,
        mesh: DeviceMesh,
    ):
        """Describe a generator.

        Args:
            folder: Checkpoint or model folder, which messages name.
            cache: The model.
            tokenizer: Tokenizer of prompts and answers.
            stop: Tokens that end a text: EOS, and those in the model's generation_config.json.
            chat_template: Name or file of a chat template, or "" if the model has none.
            mesh: Its axis tp are the ranks over which the model is sharded. Its axis cp has the size 1.
        """
        self.folder = folder
        self.cache = cache
        self.tokenizer = tokenizer
        self.stop = frozenset(stop)
        self.chat_template = chat_template
        self.max_seq_len = cache.max_seq_len
        self.mesh = mesh

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
        tp: int = 0,
        max_rows: int = 16,
    ) -> "TextGenerator":
        """Load the model and shard its matrices, collectively.

        Args:
            folder: Checkpoint, run folder, or model folder in Hugging Face's format.
            dtype: Type of the parameters and of the cache.
            device: Device of this rank.
            max_seq_len: Maximum total number of tokens in the prompt and the answer. 0: the sequence length used in training.
            chat_template: Name or file of a chat template, or "" for the model's own template.
            base: See open_weights.
            averaged: See open_weights.
            tp: Number of ranks over which the matrices are sharded. Groups of this size have the same model. 0: all ranks.
            max_rows: Number of texts that are generated at once.

        Raises:
            ConfigError: The model cannot be loaded.
        """
        folder = run_on_rank_0(partial(resolve_checkpoint, folder))
        weights = open_weights(folder, base, averaged=averaged)
        tokenizer, max_seq_len = load_model_tokenizer(weights), max_seq_len or weights.model.seq_len
        sizes, ranks = weights.sizes.without_prediction().for_seq_len(max_seq_len), dist.get_world_size()
        tp = tp or ranks
        if ranks % tp:
            raise ConfigError("", f"--tp {tp}: must divide the number of ranks, {ranks}")
        mesh = init_device_mesh(device.type, (ranks // tp, tp, 1), mesh_dim_names=("dp", "tp", "cp"))

        def shard(model: nn.Module) -> None:
            structure = model.structure()
            for name in structure.tp_divisible:
                if (getattr(sizes, name) or 0) % tp:
                    message = f"the number of ranks, {tp}, must divide {name} {getattr(sizes, name)} of {folder}"
                    raise ConfigError("", message)
            if tp > 1:
                apply_tensor(model, structure, mesh["tp"], sequence_parallel=False, recompute_gathers=())

        model = build_model(weights, sizes, dtype, device, shard)
        group = mesh["tp"].get_group() if tp > 1 else None
        cache = KvCache(model, model.structure(), sizes, dtype, group, max_seq_len, max_rows)
        stop = {tokenizer.eos, *ids_of_ends(metadata_and_generation(folder)[1])}
        chat_template = chat_template or str(weights.template_file() or "")
        return cls(folder, cache, tokenizer, stop, chat_template, mesh)

    def chat_format(self) -> ChatFormat:
        """Return the chat format that the template defines. Raises ConfigError if the model has no chat template."""
        if not self.chat_template:
            names = f"{', '.join(BUILT_IN)} or a file"
            raise ConfigError("", f"the model has no chat template; choose one with --chat-template ({names})")
        return load_chat_format(self.chat_template, self.tokenizer)

    def text_request(self, text: str, **settings: Any) -> TextRequest:
        """Return a request to continue a text, with the tokens of a document in training. It ends at the model's stop tokens.

        Args:
            text: The prompt.
            settings: Further fields of TextRequest.

        Raises:
            ConfigError: The prompt has no tokens.
        """
        prefix, tokens = self.tokenizer.prefix, self.tokenizer.encode(text)
        if not prefix and not tokens:
            message = (
                "--prompt: must not be empty, because the tokenizer adds no BOS token, so that the model has no input"
            )
            raise ConfigError("", message)
        return TextRequest(prompt=[*prefix, *tokens], continues=tokens, stop_tokens=self.stop, **settings)

    def score(self, questions: Sequence[Sequence[Request]]) -> list[list[tuple[float, bool]]]:
        """Return the score of each request of each question, collectively over the group. See score_continuations."""
        with self.cache.removed() as model:
            return score_continuations(model, questions, self.max_seq_len, self.cache.dtype, self.mesh["cp"])

    def generate(
        self, requests: Sequence[TextRequest], on_text: Callable[[int, str], None] = lambda index, text: None
    ) -> list[Answer]:
        """Return the answer to each request, collectively over the group. See trainer.inference.engine.generate.

        Raises:
            ConfigError: A prompt fills the context window, or memory is lacking.
        """
        self.require_fitting(requests)
        return generate(requests, self.cache, self.tokenizer, on_text)

    def require_fitting(self, requests: Sequence[TextRequest]) -> None:
        """Raise ConfigError if a prompt fills the context window."""
        for number, request in enumerate(requests, start=1):
            if len(request.prompt) >= self.max_seq_len:
                which = f"prompt {number}" if len(requests) > 1 else "the prompt"
                message = f"{which} has {len(request.prompt)} tokens; prompt and answer share a context window of"
                raise ConfigError("", f"{message} {self.max_seq_len} tokens (--max-seq-len)")
