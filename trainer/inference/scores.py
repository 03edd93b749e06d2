"""Log-probabilities of continuations under a loaded model, by the code that scores tasks in training."""

from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.batch import Batch
from trainer.data.sampling.loader import BatchPartition
from trainer.data.tasks.encode import Request
from trainer.data.tasks.packed_requests import PackedRequests
from trainer.objective.document_scores import DocumentScores, score_requests
from trainer.parallel.attention import backend_of
from trainer.parallel.mixers import mixers_by_document
from trainer.parallel.sample_layout import SampleLayout
from trainer.parallel.step import context_of

_TOKENS_AT_ONCE = 4096
"""Number of tokens of a batch, unless one request has more."""
_SHORTEST_SAMPLE = 512
"""Minimum number of tokens of a sample. Longer ones are less often padded, but attention computes more that is masked."""
_CHUNK_TOKENS = 1024
"""Number of tokens whose logits exist at the same time."""


@torch.no_grad()
def score_continuations(
    model: nn.Module, questions: Sequence[Sequence[Request]], max_seq_len: int, dtype: torch.dtype, cp: DeviceMesh
) -> list[list[tuple[float, bool]]]:
    """Return, for each request of each question, the log-probability of the continuation, and whether it consists of the most
    likely tokens.

    Args:
        model: Without a cache. It may be sharded over tp.
        questions: Requests that share the computation of equal contexts. The model reads at most max_seq_len tokens of each.
        max_seq_len: Maximum length of a sample.
        dtype: Dtype of the computation.
        cp: An axis of size 1.
    """
    longest = max((len(r.context) + len(r.continuation) - 1 for r in chain(*questions)), default=1)
    seq_len = min(max_seq_len, max(longest, _SHORTEST_SAMPLE))
    structure = model.structure()
    packed = PackedRequests.pack(questions, seq_len, shares_contexts=not structure.is_recurrent)
    rows = BatchPartition(local_batch_size=max(1, _TOKENS_AT_ONCE // seq_len), rank=0, ranks=1)
    device = next(model.parameters()).device

    def read(batch: Batch, readout: DocumentScores) -> Tensor:
        return model(batch.tokens, context_of(batch), head=readout.head(batch.labels, batch.documents, None))

    layout = SampleLayout(cp=cp, seq_len=seq_len, by_document=True, dtype=dtype)
    by_document = mixers_by_document([model], structure, layout, backend_of(device))
    with by_document():
        scores = score_requests(packed, read, rows, _CHUNK_TOKENS, False, device)
    pairs = zip(scores.log_probs.tolist(), scores.is_greedy.tolist(), strict=True)
    return [list(islice(pairs, len(question))) for question in questions]
