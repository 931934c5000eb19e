"""Encoder-decoder checkpoint → bundle: encoder with cross keys and values, decoder, head."""
