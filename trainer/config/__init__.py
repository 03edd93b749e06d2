"""Sections of a configuration and ConfigError."""

# ruff: noqa: F401

from trainer.config.schema import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    ConfigError,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LrScheduleConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ResilienceConfig,
    TokenizerConfig,
    TrainingConfig,
)
