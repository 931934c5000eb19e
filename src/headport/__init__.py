"""headport: language-model heads exported, quantised, run, and proved against PyTorch."""

__all__ = ["__version__"]

__version__ = "0.1.0"
