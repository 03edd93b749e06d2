"""Llama 2, 3, 3.1 and 3.2: one network, told apart by their sizes."""

from models.llama import hf, sizes
from models.llama.model import Llama
from models.llama.plan import plan
from models.spec import HuggingFace, ModelSpec

_HUGGINGFACE = HuggingFace(
    name=hf.hf_name,
    turned=hf.turned,
    rows_to=hf.rows_to_hf,
    rows_from=hf.rows_from_hf,
    config=hf.config_of,
    sizes=hf.sizes_of,
)

LLAMA2 = ModelSpec(network=Llama, sizes=sizes.LLAMA2, plan=plan, huggingface=_HUGGINGFACE)
LLAMA3 = ModelSpec(network=Llama, sizes=sizes.LLAMA3, plan=plan, huggingface=_HUGGINGFACE)
LLAMA3_1 = ModelSpec(network=Llama, sizes=sizes.LLAMA3_1, plan=plan, huggingface=_HUGGINGFACE)
LLAMA3_2 = ModelSpec(network=Llama, sizes=sizes.LLAMA3_2, plan=plan, huggingface=_HUGGINGFACE)
