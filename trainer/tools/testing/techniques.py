"""Settings of the techniques that save memory."""

BASELINE = {
    "training.local_batch_size": "4",
    "training.global_batch_size": "4",
    "training.loss_chunk_tokens": "100000000",
    "training.max_norm": "none",
}
"""Settings without any technique."""
TECHNIQUES = {
    "chunked loss": {"training.loss_chunk_tokens": "1024"},
    "activation checkpointing": {"activation_checkpoint.mode": "full"},
    "block inputs in host memory": {"activation_checkpoint.offload_inputs": "true"},
    "update in backward": {"optimizer.in_backward": "true", "resilience.max_consecutive_skips": "1"},
    "8-bit moments": {"optimizer.state_dtype": "8bit"},
    "bf16 parameters": {"training.parameter_dtype": "bf16"},
    "optimizer in host memory instead": {
        "optimizer.in_backward": "false",
        "optimizer.state_dtype": "fp32",
        "optimizer.offload": "state_and_gradients",
    },
}
"""Name of a technique -> its settings. Each technique is added to those before it."""
