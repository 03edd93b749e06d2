"""Llama 2, 3, 3.1 and 3.2: one network, told apart by their sizes."""

from models.llama import sizes
from models.llama.model import Llama
from models.llama.plan import plan
from models.spec import ModelSpec

LLAMA2 = ModelSpec(network=Llama, sizes=sizes.LLAMA2, plan=plan)
LLAMA3 = ModelSpec(network=Llama, sizes=sizes.LLAMA3, plan=plan)
LLAMA3_1 = ModelSpec(network=Llama, sizes=sizes.LLAMA3_1, plan=plan)
LLAMA3_2 = ModelSpec(network=Llama, sizes=sizes.LLAMA3_2, plan=plan)
