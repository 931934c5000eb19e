"""Planted faults, one module per kind of place; `table` writes them into docs/validate.md.

Every row is a test: the fault is planted, the gates named must fail, and what explains the report
must name the part.
"""
