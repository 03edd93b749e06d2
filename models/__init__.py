"""The model families that a configuration can select by name."""

from models.deepseek import DEEPSEEK_V3
from models.gemma import GEMMA2, GEMMA3
from models.gemma4 import GEMMA4
from models.glm import GLM_4_5
from models.gpt_oss import GPT_OSS
from models.granite import GRANITE3
from models.kimi import KIMI_LINEAR
from models.llama import LLAMA2, LLAMA3, LLAMA3_1, LLAMA3_2
from models.mistral import MINISTRAL3, MISTRAL
from models.mixtral import MIXTRAL
from models.olmo import OLMO2, OLMO3, OLMO_HYBRID, OLMOE
from models.phi import PHI
from models.qwen import QWEN2_5, QWEN3, QWEN3_MOE
from models.qwen_next import QWEN3_5, QWEN3_NEXT
from models.smollm import SMOLLM3
from models.spec import ModelSpec

MODELS: dict[str, ModelSpec] = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama3.1": LLAMA3_1,
    "llama3.2": LLAMA3_2,
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "ministral3": MINISTRAL3,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite3": GRANITE3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi": PHI,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen3-moe": QWEN3_MOE,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss": GPT_OSS,
    "gemma4": GEMMA4,
    "glm-4.5": GLM_4_5,
    "qwen3-next": QWEN3_NEXT,
    "qwen3.5": QWEN3_5,
    "olmo-hybrid": OLMO_HYBRID,
    "kimi-linear": KIMI_LINEAR,
}
