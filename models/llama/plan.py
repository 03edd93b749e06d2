"""The parallel plan of Llama."""

from models.llama.sizes import LlamaSizes
from models.spec import ParallelPlan


def plan(sizes: LlamaSizes) -> ParallelPlan:
    # With tied embeddings, the embedding and the output share a parameter, so both must be in one unit.
    tied_units = (("tok_embeddings", "norm", "output"),)
    return ParallelPlan(
        blocks="layers",
        pre_blocks=("tok_embeddings",),
        post_blocks=("norm", "output"),
        fsdp_units=tied_units if sizes.tied_embeddings else (("tok_embeddings",), ("norm", "output")),
        tied=sizes.tied_embeddings,
        tensor={"tok_embeddings": "embedding", "norm": "norm", "output": "output"},
        tensor_block={
            "attention_norm": "norm",
            "attention": "gather",
            "attention.wq": "column",
            "attention.wk": "column",
            "attention.wv": "column",
            "attention.wo": "row",
            "ffn_norm": "norm",
            "feed_forward": "gather",
            "feed_forward.w1": "column",
            "feed_forward.w3": "column",
            "feed_forward.w2": "row",
        },
        tp_divisible=("n_heads", "n_kv_heads", "hidden_dim"),
        attention="attention.core",
        mask="mask",
    )
