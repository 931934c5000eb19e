"""Passes of the target `tensorrt`: attention with growing caches, heads, and what they list."""
