"""Which matrices of a backbone get the smaller of two formats, chosen by measurement."""

from __future__ import annotations
