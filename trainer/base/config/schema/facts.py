"""The facts of the compatibility table: what is known of a run besides its settings. The comments say who knows them."""

from trainer.base.config.schema.condition import Fact

# The settings themselves, or paths in them: trainer/base/config/compatibility.py.
STEPS_GIVEN = Fact("[training] steps")
GROUP_OF_MUON = Fact("optimizer = muon in [optimizer] groups", "optimizer.groups")
TYPED = Fact("the type of its files")
LOCAL_MODEL = Fact("a path as [model] pretrained")
EXPORTS_BEST = Fact("an export of the best checkpoint")

# The model and the layout: trainer/run/facts.py.
HAS_EXPERTS = Fact("a model with experts")
HAS_CORRECTION = Fact("a model whose routers have a correction")
PREDICTS = Fact("layers for multi-token prediction (model.overrides.prediction_layers)")
TIED = Fact("a model with tied embeddings")
SHARES_TABLE = Fact("a pipeline whose first and last stage share a table", "parallel.pp")
SPLITS_BACKWARD = Fact(
    "a pipeline that computes gradients of inputs and weights separately", "parallel.pipeline_schedule"
)
FSDP = Fact("FSDP")
COMPILED = Fact("compiled blocks ([compile] enabled)")
GPU = Fact("a GPU")
TORCH_2_12 = Fact("torch >= 2.12")
TORCH_2_13 = Fact("torch >= 2.13")

# The trained parameters: trainer/run/facts.py.
ADAPTED_EXPERTS = Fact("adapters of experts")
TRAINED_BASE = Fact("a trained matrix of the blocks")
FROZEN_VOCABULARY = Fact("a frozen matrix with a row for each token")
UNKNOWN_TO_PEFT = Fact("parameters that peft cannot train alone")
DECAYS = Fact("a trained parameter with weight decay")
UPDATED_BY_MUON = Fact("a matrix that no group gives to adamw")

# The device of the run or of its plan: trainer/runtime/device.py, trainer/tools/planner/estimate.py.
FLOAT8_DEVICE = Fact("a device with products in float8")
FLOAT8_GPU = Fact("products on a GPU")

# Who uses the settings: trainer/tools/planner/estimate.py, trainer/tools/testing/parity.py, trainer/build.py, scripts.
PLANNED = Fact("a plan")
GRADIENTS_COMPARED = Fact("a comparison of gradients")
WIDTHS_COMPARED = Fact("a comparison of widths")
SWEPT = Fact("a sweep", "metrics.sinks")
TRANSFORMERS = Fact("--reference transformers")
OWN_OBJECTIVE = Fact("an objective of your own")
