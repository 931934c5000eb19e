"""What the validating process and its reference process say to each other.

Each message is one JSON line. `Scored` is followed by what goes into the head, rows · hidden_size
float32, then by its logits, rows · vocab_size float32, both little-endian; `Layered` by its
states, stages · rows · hidden_size float32; `Answered` by its arrays. The reference processes
import this file, so it imports no graph or runtime code.
"""

from __future__ import annotations

from typing import IO

import msgspec

from headport.validate.given_source import GivenSource
from headport.validate.records import Messages
from headport.validate.report import ReferenceFacts

__all__ = [
    "Answer",
    "Answered",
    "AskHeads",
    "ContinueGreedily",
    "Continued",
    "Draw",
    "Drawn",
    "Encode",
    "EncodeChats",
    "Encoded",
    "Failure",
    "Layered",
    "Layers",
    "Lens",
    "Lensed",
    "Ready",
    "Request",
    "SamplingCase",
    "Score",
    "Scored",
    "read_answer",
    "read_request",
    "write_message",
]


class _Message(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Base of every message; `kind` tells them apart."""


class Encode(_Message, frozen=True, tag="encode"):
    """Ask for the token ids of texts, special tokens included."""

    texts: tuple[str, ...]


class EncodeChats(_Message, frozen=True, tag="encode_chats"):
    """Ask for the token ids of conversations by the chat template; nothing is added to it."""

    chats: tuple[Messages, ...]


class Score(_Message, frozen=True, tag="score"):
    """Ask for the logits after each of these tokens, which start a context of their own."""

    token_ids: tuple[int, ...]
    hidden: bool = False  # also what goes into the head
    other_path: bool = False  # through the second code path, for the noise floor
    source: GivenSource | None = None  # what an encoder-decoder model answers to


class ContinueGreedily(_Message, frozen=True, tag="continue"):
    """Ask for `steps` greedy tokens after each of some prompts of equal length."""

    token_ids: tuple[tuple[int, ...], ...]
    steps: int
    sources: tuple[GivenSource, ...] = ()  # one per prompt, of an encoder-decoder model


class SamplingCase(msgspec.Struct, frozen=True):
    """Sampling parameters and a past, as `runtime/SAMPLING.md` defines them."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    logit_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    allowed: tuple[int, ...] = ()  # empty: all
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()  # what the rules see, whatever the logits come from
    reply: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


class Layers(_Message, frozen=True, tag="layers"):
    """Ask for the states between the layers, of tokens that start a context of their own."""

    token_ids: tuple[int, ...]
    other_path: bool = False


class Lens(_Message, frozen=True, tag="lens"):
    """Ask what the model would say after each of its layers, see `lens.read_layers`."""

    token_ids: tuple[int, ...]


class Draw(_Message, frozen=True, tag="draw"):
    """Ask for tokens drawn from the logits after these tokens."""

    token_ids: tuple[int, ...]
    cases: tuple[SamplingCase, ...]
    keys: tuple[tuple[int, int, int], ...]  # seed, step, sample of each draw
    free: SamplingCase  # whose whole distribution is asked for
    source: GivenSource | None = None


class AskHeads(_Message, frozen=True, tag="heads"):
    """Ask what every head says about one text."""

    token_ids: tuple[int, ...]


class Ready(_Message, frozen=True, tag="ready"):
    """The model is loaded."""

    facts: ReferenceFacts
    head_slope: float | None
    other_path: str  # in words; empty if the model knows only one
    hidden_size: int  # of what goes into the head; 0: head not found
    start_token: int | None = None  # of the decoder; None: the model reads no source
    heads: tuple[str, ...] = ()  # that `AskHeads` asks
    labels: dict[str, dict[str, tuple[str, ...]]] = {}  # head → task → names of its scores


class Encoded(_Message, frozen=True, tag="encoded"):
    """Token ids of each text."""

    token_ids: tuple[tuple[int, ...], ...]


class Scored(_Message, frozen=True, tag="scored"):
    """Announces logits [rows, vocab_size]; the bounds are one per row, in logits."""

    rows: int
    vocab_size: int
    hidden_size: int  # 0: no hidden states
    near_tie_bound: tuple[float, ...]
    seconds: float  # of the forward pass


class Layered(_Message, frozen=True, tag="layered"):
    """Announces states [stages, rows, hidden_size]: see `layers.LayerWatch`; 0 stages: none."""

    stages: int
    rows: int
    hidden_size: int


class Lensed(_Message, frozen=True, tag="lensed"):
    """Of each stage and position; no stages where the model has none."""

    choices: tuple[tuple[int, ...], ...]  # likeliest token
    probabilities: tuple[tuple[float, ...], ...]  # of it
    of_final: tuple[tuple[float, ...], ...]  # of the token that is likeliest after the last stage


class Continued(_Message, frozen=True, tag="continued"):
    """Greedy tokens of each prompt; per step, best minus second-best logit and near-tie bound."""

    token_ids: tuple[tuple[int, ...], ...]
    margins: tuple[tuple[float, ...], ...]
    near_tie_bound: tuple[tuple[float, ...], ...]


class Drawn(_Message, frozen=True, tag="drawn"):
    """Announces the logits [vocab_size] that were drawn from."""

    vocab_size: int
    tokens: tuple[tuple[int, ...], ...]  # per case, per key
    kept: tuple[int, ...]  # tokens that each case's filters leave
    distribution: tuple[tuple[int, float], ...]  # token id, probability


class Answered(_Message, frozen=True, tag="answered"):
    """Announces what heads say: of each array head, name and shape, in order."""

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]


class Failure(_Message, frozen=True, tag="failure"):
    """An expected failure: the name of a class in `headport.errors`, and its message."""

    error: str
    message: str


Request = Encode | EncodeChats | Score | Layers | Lens | ContinueGreedily | Draw | AskHeads
Answer = Ready | Encoded | Scored | Layered | Lensed | Continued | Drawn | Answered | Failure

_ENCODER = msgspec.json.Encoder()
_REQUESTS = msgspec.json.Decoder(Request)
_ANSWERS = msgspec.json.Decoder(Answer)


def write_message(stream: IO[bytes], message: Request | Answer) -> None:
    """Write one message and flush."""
    stream.write(_ENCODER.encode(message) + b"\n")
    stream.flush()


def read_request(stream: IO[bytes]) -> Request | None:
    """The next request, or None when the other side has closed the stream."""
    line = stream.readline()
    return _REQUESTS.decode(line) if line.endswith(b"\n") else None


def read_answer(stream: IO[bytes]) -> Answer | None:
    """The next answer, or None when the other side has closed the stream or died."""
    line = stream.readline()
    return _ANSWERS.decode(line) if line.endswith(b"\n") else None
