"""Counting: how often a corpus uses each token, of a tokenizer that a checkpoint brings."""
