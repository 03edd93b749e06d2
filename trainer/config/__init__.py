"""Dataclasses of the configuration and its sections, and ConfigError."""

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
    ExpertsConfig,
    LoraConfig,
    LrScheduleConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PreferenceConfig,
    ProfilingConfig,
    ResilienceConfig,
    SamplesConfig,
    TokenizerConfig,
    TrainingConfig,
    errors_about,
)
