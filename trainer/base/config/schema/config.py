"""The configuration of a run: its sections, each of which is declared in a module beside this one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal

from trainer.base.config.errors import ConfigError
from trainer.base.config.schema.checkpoint import CheckpointConfig
from trainer.base.config.schema.data import DataConfig, split_dataset
from trainer.base.config.schema.model import LoraConfig, ModelConfig, TokenizerConfig
from trainer.base.config.schema.observation import EvaluationConfig, MetricsConfig, ProfilingConfig, SamplesConfig
from trainer.base.config.schema.parallel import ActivationCheckpointConfig, CompileConfig, ExpertsConfig, ParallelConfig
from trainer.base.config.schema.run import DistributedConfig, ResilienceConfig, RunConfig
from trainer.base.config.schema.training import LrScheduleConfig, OptimizerConfig, PreferenceConfig, TrainingConfig
from trainer.base.config.toml_text import toml_value


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run. Each field except `origins` is a section of the TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Origin of each setting given in the TOML file or on the command line: {"training.steps": "--training.steps 5"}."""

    @property
    def trained_dtype(self) -> Literal["fp32", "bf16"]:
        """Precision of the trained parameters between steps."""
        return self.training.parameter_dtype if self.lora.rank is None else self.lora.dtype

    def value(self, key: str) -> Any:
        """Return the value of a setting. key: "section.name", or "section.table.entry" for the complete table."""
        section, name = key.split(".")[:2]
        return getattr(getattr(self, section), name)

    def datasets(self) -> Iterator[tuple[str, str, str]]:
        """Yield (setting, type, path) of each dataset."""
        yield "data.path", self.data.dataset, self.data.path
        for table in ("data.datasets", "evaluation.datasets"):
            for name, text in self.value(table).items():
                yield f"{table}.{name}", *split_dataset(text)

    def explain(self, error: ConfigError) -> str:
        """Return the error line for the user: the origin of the value, then the broken rule."""
        if not error.key:
            return error.message
        section, _, name = error.key.partition(".")
        value, (owner, _, option) = self.value(error.key), name.rpartition(".")
        entry = value.get(owner.partition(".")[2]) if isinstance(value, Mapping) else None
        if is_dataclass(entry):
            section, name, value = f"{section}.{owner}", option, getattr(entry, option)
        default = f"[{section}] {name} = {toml_value(value)} (default)"
        return f"{self.origins.get(error.key, default)}: {error.message}"

    @contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Context manager whose body raises each ConfigError with the complete line for the user."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError("", self.explain(error)) from None
