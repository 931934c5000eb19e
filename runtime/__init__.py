"""bundle → tokens: generation, streaming, logits and scores with ONNX Runtime.

Needs neither torch nor transformers nor onnx.
"""

from headport.runtime.generator import Generator, TokenStream
from headport.runtime.results import Generation, Score, Stats, Token

__all__ = ["Generation", "Generator", "Score", "Stats", "Token", "TokenStream"]
