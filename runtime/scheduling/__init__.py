"""Requests that share one session: they join and leave between steps."""
