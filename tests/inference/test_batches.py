"""A batch of texts: each is the same alone, in any batch, on any number of ranks, and in transformers."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models.decoder import Decoder
from tests.models.families import CASES, hf_model_of, model_of
from trainer.base.config import ConfigError
from trainer.inference import kv_cache
from trainer.inference.engine import Sampling, TextRequest, generate
from trainer.inference.kv_cache import KvCache
from trainer.parallel.tensor import apply_tensor

VOCABULARY = 71
NEW = 7
GREEDY = Sampling(temperature=0)


class Letters:
    """A tokenizer whose tokens are characters."""

    vocab_size = VOCABULARY

    def decode(self, tokens):
        return "".join(chr(ord("0") + token) for token in tokens)


def cache_of(model: Decoder, max_rows: int = 7) -> KvCache:
    return KvCache(model, model.structure(), model.sizes, torch.float32, max_seq_len=64, max_rows=max_rows)


def prompts() -> list[list[int]]:
    """Seven prompts of odd lengths."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (5, 1, 13, 3, 21, 9, 7)]


def requests(**settings) -> list[TextRequest]:
    return [TextRequest(prompt=prompt, max_new_tokens=NEW, **{"sampling": GREEDY} | settings) for prompt in prompts()]


def tokens_of(answers) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(("family", "index"), CASES)
def test_greedy_tokens_of_a_batch_are_those_of_each_text_alone_and_of_transformers(family, index):
    cache = cache_of(model_of(family, index))
    together = tokens_of(generate(requests(), cache, Letters()))
    assert together == [tokens_of(generate([request], cache, Letters()))[0] for request in requests()]
    if getattr(cache._model.sizes, "rope_is_long", False):
        return  # transformers changes the factors of LongRoPE during the generation
    model = hf_model_of(family, index)
    for prompt, tokens in zip(prompts(), together, strict=True):
        with torch.no_grad():
            likeliest = model(torch.tensor([prompt + tokens])).logits[0].argmax(-1)
        assert tokens == likeliest[len(prompt) - 1 : -1].tolist()


def tokens_on_ranks(families):
    """Return the tokens of each family's batch, greedy and sampled in turns, with the model sharded over all ranks."""
    mesh, results = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for i, family in enumerate(families):
        model, sampling = model_of(family, 0), Sampling(temperature=i % 2)
        structure = model.structure()
        if mesh.size() > 1:
            apply_tensor(model, structure, mesh, sequence_parallel=False, recompute_gathers=())
        cache = KvCache(model, structure, model.sizes, torch.float32, mesh.get_group(), max_seq_len=64)
        short = [replace(request, max_new_tokens=4, sampling=sampling) for request in requests()]
        results.append(tokens_of(generate(short, cache, Letters())))
    return results


def test_tensor_parallelism_does_not_change_a_batch(ranks):
    families = list(dict.fromkeys(family for family, _ in CASES))
    (expected,) = ranks(1).run(tokens_on_ranks, families)
    assert ranks(2).run(tokens_on_ranks, families) == [expected] * 2


def test_a_sampled_text_does_not_depend_on_its_neighbours():
    cache = cache_of(model_of("llama3", 0))
    sampled = [TextRequest(prompt=prompt, seed=seed) for seed, prompt in enumerate([prompts()[0]] * 3 + prompts())]
    together = tokens_of(generate(sampled, cache, Letters()))
    assert together == [tokens_of(generate([request], cache, Letters()))[0] for request in sampled]
    assert len({tuple(tokens) for tokens in together[:3]}) == 3
    cache.max_rows = 2
    assert tokens_of(generate(sampled[::-1], cache, Letters())) == together[::-1]


@pytest.mark.parametrize("limit", [1, 7, 40])
@pytest.mark.parametrize(("family", "index"), [("gemma2", 0), ("gpt-oss", 0), ("mistral", 0)])
def test_prompts_are_read_in_parts_of_any_size(family, index, limit, monkeypatch):
    cache = cache_of(model_of(family, index))
    expected = tokens_of(generate(requests(), cache, Letters()))
    monkeypatch.setattr(kv_cache, "_TOKENS_AT_ONCE", limit)
    cache.tokens = {}
    assert tokens_of(generate(requests(), cache, Letters())) == expected


def test_texts_of_different_lengths_leave_the_batch():
    cache = cache_of(model_of("gemma3", 0))
    lengths = (1, 9, 2, 30, 1, 12, 4)
    mixed = [replace(r, max_new_tokens=n) for r, n in zip(requests(), lengths, strict=True)]
    rows = []
    forward = cache._forward
    cache._forward = lambda texts, *args, **kwargs: rows.append(len(texts)) or forward(texts, *args, **kwargs)
    answers = generate(mixed, cache, Letters())
    assert [len(answer.tokens) for answer in answers] == list(lengths)
    assert rows == [7, 7] + [7] * 2 + [3] * 8 + [1] * 18, "half of the batch has ended before the others are copied"
    assert tokens_of(answers) == [tokens_of(generate([request], cache, Letters()))[0] for request in mixed]


def test_a_row_that_is_not_finite_affects_no_other():
    model = model_of("mixtral", 0)
    expected = tokens_of(generate(requests(), cache_of(model_of("mixtral", 0)), Letters()))
    bad = next(t for t in prompts()[4] if all(t not in p + e for p, e in zip(prompts()[:4], expected[:4], strict=True)))
    with torch.no_grad():
        model.tok_embeddings.weight[bad] = torch.nan
    answers = generate(requests(), cache_of(model), Letters())
    broken = [bad in [*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts(), expected, strict=True)]
    assert sum(broken) in range(1, 6)
    for answer, tokens, is_broken in zip(answers, expected, broken, strict=True):
        assert answer.end == ("non-finite" if is_broken else "length")
        assert is_broken or answer.tokens == tokens


def test_a_batch_that_memory_cannot_hold_is_an_error():
    cache = cache_of(model_of("llama3", 0))
    message = f"not enough memory for a KV cache of 3 texts of {2**40} tokens; lower the batch size"
    with pytest.raises(ConfigError, match=message):
        cache.reserve(3, 2**40)
