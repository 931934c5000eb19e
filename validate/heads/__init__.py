"""Heads beside the LM head, as they run, compared with PyTorch on texts."""
