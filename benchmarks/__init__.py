"""Runnable measurements; each prints its figures with the command, machine and versions."""
