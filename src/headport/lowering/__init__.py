"""Lowering: rewriting portable graphs for one target."""
