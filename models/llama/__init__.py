"""Llama 2, 3, 3.1 and 3.2. These families share one model and differ only in its sizes."""

from models.llama import hf, sizes
from models.llama.model import Llama
from models.llama.plan import plan
from models.spec import HuggingFace, ModelSpec

_HUGGINGFACE = HuggingFace(
    name=hf.hf_name,
    is_buffer=hf.is_buffer,
    is_rope_permuted=hf.is_rope_permuted,
    permute_to_hf=hf.permute_to_hf,
    permute_from_hf=hf.permute_from_hf,
    config=hf.hf_config,
    sizes=hf.sizes_from_hf,
    seq_len=hf.seq_len_from_hf,
)

LLAMA2 = ModelSpec(model=Llama, sizes=sizes.LLAMA2, plan=plan, huggingface=_HUGGINGFACE)
LLAMA3 = ModelSpec(model=Llama, sizes=sizes.LLAMA3, plan=plan, huggingface=_HUGGINGFACE)
LLAMA3_1 = ModelSpec(model=Llama, sizes=sizes.LLAMA3_1, plan=plan, huggingface=_HUGGINGFACE)
LLAMA3_2 = ModelSpec(model=Llama, sizes=sizes.LLAMA3_2, plan=plan, huggingface=_HUGGINGFACE)
