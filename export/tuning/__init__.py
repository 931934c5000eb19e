"""Adapters that PEFT trained: read, checked against their model, and applied to it."""
