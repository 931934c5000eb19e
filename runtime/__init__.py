"""bundle → tokens: generation, streaming, logits and scores with ONNX Runtime.

Needs neither torch nor transformers nor onnx.
"""

from headport.runtime.async_generator import AsyncGenerator, AsyncTokenStream
from headport.runtime.generator import Generator
from headport.runtime.heads import Heads, HeadStats, TaskScores
from headport.runtime.parts import Parts
from headport.runtime.results import Generation, Score, Stats, Token
from headport.runtime.sampling.choice import Choice, TopLogprob
from headport.runtime.sampling.settings import Context
from headport.runtime.states import States
from headport.runtime.submission import Submission, TokenStream

__all__ = [
    "AsyncGenerator",
    "AsyncTokenStream",
    "Choice",
    "Context",
    "Generation",
    "Generator",
    "HeadStats",
    "Heads",
    "Parts",
    "Score",
    "States",
    "Stats",
    "Submission",
    "TaskScores",
    "Token",
    "TokenStream",
    "TopLogprob",
]
