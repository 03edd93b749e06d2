"""How a Llama network may be cut."""

from models.llama.sizes import LlamaSizes
from models.spec import ParallelPlan


def plan(sizes: LlamaSizes) -> ParallelPlan:
    """Tied embeddings: one parameter must stay in one unit, so embedding and output are gathered together."""
    if sizes.tied_embeddings:
        return ParallelPlan(blocks="layers", fsdp_units=(("tok_embeddings", "norm", "output"),))
    return ParallelPlan(blocks="layers", fsdp_units=(("tok_embeddings",), ("norm", "output")))
