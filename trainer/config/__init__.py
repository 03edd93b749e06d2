"""Sections of a configuration and ConfigError."""

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

__all__ = [
    "ActivationCheckpointConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "LrScheduleConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ResilienceConfig",
    "TokenizerConfig",
    "TrainingConfig",
]
