"""The exact INT8 head on SmolLM2 with an off-grid head; see `__main__`."""
