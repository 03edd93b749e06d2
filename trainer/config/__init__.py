"""Dataclasses of the configuration and its sections, and ConfigError."""

# ruff: noqa: F401

from trainer.config.errors import ConfigError, errors_about
from trainer.config.schema.checkpoint import CheckpointConfig
from trainer.config.schema.config import Config
from trainer.config.schema.data import DataConfig
from trainer.config.schema.model import LoraConfig, ModelConfig, TokenizerConfig
from trainer.config.schema.observation import EvaluationConfig, MetricsConfig, ProfilingConfig, SamplesConfig
from trainer.config.schema.parallel import ActivationCheckpointConfig, CompileConfig, ExpertsConfig, ParallelConfig
from trainer.config.schema.run import DistributedConfig, ResilienceConfig
from trainer.config.schema.training import LrScheduleConfig, OptimizerConfig, PreferenceConfig, TrainingConfig
