"""The sections of a configuration and its error, re-exported."""

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
