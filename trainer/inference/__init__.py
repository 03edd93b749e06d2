from trainer.inference.load import load_model

__all__ = ["load_model"]
