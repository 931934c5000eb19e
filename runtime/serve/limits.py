"""What one client may take of a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headport.errors import RequestError, UsageError

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

    def check(self, prompts: int, options: Mapping[str, Any]) -> None:
        """Hold one request against them.

        Args:
            prompts: How many it has.
            options: What it asks for, `n` among it; wrong values are the generator's to refuse.

        Raises:
            RequestError: Naming every limit that it exceeds.
        """
        n, wanted = options["n"], options.get("max_new_tokens", 1)
        faults = []
        if isinstance(n, int) and prompts * n > self.replies:
            faults.append(f"{prompts} prompts times n={n} exceed {self.replies} replies")
        if isinstance(wanted, int) and wanted > self.new_tokens:
            faults.append(f"{wanted} tokens exceed {self.new_tokens} per reply")
        if faults:
            raise RequestError(f"this service's limits: {'; '.join(faults)}")
