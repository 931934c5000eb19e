"""A headport bundle as a model of Triton's python backend; `headport triton` wrote this file.

It needs headport[cpu] or headport[gpu] where Triton's interpreter finds packages: installed there,
or in the virtual environment that EXECUTION_ENV_PATH names in config.pbtxt.
"""

from __future__ import annotations

import sys
from typing import Any


class TritonPythonModel:
    """What the python backend looks for by this name."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside this file."""
        here = ".".join(map(str, sys.version_info[:3]))
        if sys.version_info < (3, 11):  # noqa: UP036 - it is Triton's interpreter, not ours
            raise RuntimeError(
                f"headport needs Python 3.11 or newer, this python backend embeds {here}; use a "
                "Triton release with a newer one, or a triton_python_backend_stub built for it"
            )
        try:
            from headport.runtime.triton.service import Service
        except ModuleNotFoundError as error:
            raise RuntimeError(
                f"the package {error.name} is not installed for the Python {here} of this python "
                "backend; install headport[cpu] there, or in the virtual environment that "
                "EXECUTION_ENV_PATH names in config.pbtxt (headport triton --environment)"
            ) from error
        self._service = Service(args)

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; each is answered through its own sender, when it is done."""
        self._service.take(requests)

    def finalize(self) -> None:
        """End what still runs."""
        self._service.close()
