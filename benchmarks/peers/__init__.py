"""Decode beside the peers."""
