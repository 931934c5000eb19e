"""Every error headport raises on purpose; anything else that escapes is a bug of ours."""

from __future__ import annotations

__all__ = [
    "BundleError",
    "CancelledRequestError",
    "CheckpointError",
    "ClosedError",
    "DeadlineError",
    "EngineError",
    "ExportError",
    "HeadportError",
    "LoweringError",
    "MergeError",
    "NoGpuError",
    "NonFiniteError",
    "OutputError",
    "OverloadedError",
    "ParityError",
    "PromptError",
    "QuantizeError",
    "ReferenceProcessError",
    "RequestError",
    "UsageError",
]


class HeadportError(Exception):
    """Root of all expected failures; the message says what was expected, found and what to do."""

    exit_code = 2


class UsageError(HeadportError):
    """An option, a recipe or a gates file asks for something that does not exist."""


class CheckpointError(HeadportError):
    """The checkpoint is missing, incomplete, or not one that headport can read."""


class ExportError(HeadportError):
    """The model has a feature that cannot be exported faithfully; the feature is named."""


class QuantizeError(HeadportError):
    """The weights or the recipe cannot be quantised as asked."""


class LoweringError(HeadportError):
    """A bundle cannot be lowered to the target, or the target cannot run what it holds."""


class MergeError(HeadportError):
    """A bundle cannot become one graph that another runtime runs right; the reason is named."""


class EngineError(HeadportError):
    """An engine cannot be built as asked, or what was built is not what was asked for."""


class NoGpuError(HeadportError):
    """A GPU is needed and none can be used here: driver, card or compute capability is missing."""


class BundleError(HeadportError):
    """A bundle is damaged, foreign, of an unknown schema, or points outside itself."""


class RunError(HeadportError):
    """A graph that loaded failed while it ran: it was changed, or memory is short."""

    exit_code = 1


class OutputError(HeadportError):
    """The output cannot be written: it exists, or there is no space or permission."""


class RequestError(HeadportError):
    """A sampling parameter or a generation request is out of range."""


class PromptError(RequestError):
    """A prompt is empty, holds unknown ids, or does not fit the context."""


class ParityError(HeadportError):
    """The written files do not answer like what they were made from; nothing is written."""

    exit_code = 1


class ReferenceProcessError(HeadportError):
    """The process that runs the PyTorch reference ended before it answered; nothing is proved."""

    exit_code = 1


class NonFiniteError(HeadportError):
    """A logit is NaN or infinite, so no token may be drawn from the row."""

    exit_code = 1


class CancelledRequestError(HeadportError):
    """A request was cancelled by its caller before it was done."""

    exit_code = 1


class DeadlineError(HeadportError):
    """A request was not done by its deadline."""

    exit_code = 1


class OverloadedError(HeadportError):
    """More requests wait than the generator was told to hold; try again later."""

    exit_code = 1


class ClosedError(HeadportError):
    """The generator was closed, so it takes no request and ends those it has."""

    exit_code = 1
