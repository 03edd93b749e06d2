"""Dataclasses of the configuration and its sections, and ConfigError."""

# ruff: noqa: F401

from trainer.base.config.errors import ConfigError, errors_about
from trainer.base.config.schema.checkpoint import CheckpointConfig
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.data import DataConfig
from trainer.base.config.schema.model import LoraConfig, ModelConfig, TokenizerConfig
from trainer.base.config.schema.observation import EvaluationConfig, MetricsConfig, ProfilingConfig, SamplesConfig
from trainer.base.config.schema.parallel import ActivationCheckpointConfig, CompileConfig, ExpertsConfig, ParallelConfig
from trainer.base.config.schema.run import DistributedConfig, ResilienceConfig
from trainer.base.config.schema.tasks import TaskConfig
from trainer.base.config.schema.training import (
    GroupOptions,
    LrScheduleConfig,
    OptimizerConfig,
    PreferenceConfig,
    TrainingConfig,
)
