"""lm-evaluation-harness with bundles: `python -m headport.validate.harness --model headport …`.

The harness finds models by name among its own; this registers one more and hands over to the
harness's command line.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from headport.errors import UsageError

__all__ = ["main", "register"]


def register() -> None:
    """Make the model `headport` known to lm_eval; for those who call it from Python.

    Raises:
        UsageError: If lm_eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UsageError(
            "lm_eval is not installed; pip install 'lm-eval>=0.4.13,<0.5' (with torch, which the "
            "harness itself needs)"
        )
    import_module("headport.validate.harness_model")


def main() -> int:
    """Register the model, then run the harness on the command line's arguments."""
    try:
        register()
    except UsageError as error:
        print(f"headport: {error}", file=sys.stderr)
        return error.exit_code
    import_module("lm_eval.__main__").cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
