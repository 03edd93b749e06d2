"""The model families that a configuration can select by name."""

from models.llama import LLAMA2, LLAMA3, LLAMA3_1, LLAMA3_2
from models.spec import ModelSpec

MODELS: dict[str, ModelSpec] = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama3.1": LLAMA3_1,
    "llama3.2": LLAMA3_2,
}
