"""Analyse: what a model's logits say about single terms, ends, loops and certainty."""
