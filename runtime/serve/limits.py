"""What one client may take of a service."""

from __future__ import annotations

from dataclasses import dataclass

from headport.errors import UsageError

__all__ = ["ServiceLimits"]


@dataclass(frozen=True)
class ServiceLimits:
    """Upper bounds of one request.

    Raises:
        UsageError: If one is not above 0.
    """

    body_bytes: int = 1 << 20
    new_tokens: int = 1024  # of one reply
    replies: int = 32  # prompts times `n`
    seconds: float = 300.0  # from the request to its last token, waiting included

    def __post_init__(self) -> None:
        faults = [f"{name}={value}" for name, value in vars(self).items() if not value > 0]
        if faults:
            raise UsageError(f"limits must be above 0: {', '.join(faults)} was given")
