"""The price tag: what a smaller vocabulary costs on text it has not seen."""
