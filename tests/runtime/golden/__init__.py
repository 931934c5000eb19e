"""Golden vectors of the sampler; `make.py` writes them."""

from pathlib import Path

FILE = Path(__file__).parent / "sampler.json"
