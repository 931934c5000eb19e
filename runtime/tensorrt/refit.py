"""Weights into an engine that was built without them (`headport engine --strip-weights`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headport.errors import EngineError

__all__ = ["CALLS", "refit"]

# All that this file asks of a backend, for a check by name.
CALLS = (
    *("Refitter", "OnnxParserRefitter"),
    *("Refitter.get_missing_weights", "Refitter.refit_cuda_engine"),
    *("OnnxParserRefitter.refit_from_file", "OnnxParserRefitter.num_errors"),
    *("OnnxParserRefitter.get_error",),
)
_MOST_NAMED = 5


def refit(trt: Any, engine: Any, graph: Path, logger: Any) -> None:
    """Give an engine the weights of the graph that it was built of.

    Args:
        trt: The backend's module.
        engine: Without weights.
        graph: The `.onnx` file; its tensors are found beside it.
        logger: The library's.

    Raises:
        EngineError: If the library cannot refit, the graph is another, or weights are missing.
    """
    if not hasattr(trt, "Refitter") or not hasattr(trt, "OnnxParserRefitter"):
        raise EngineError(
            f"{trt.__name__} {trt.__version__} puts no weights into an engine; build the plan "
            "again without --strip-weights"
        )
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(graph)):
        said = "; ".join(str(parser.get_error(n).desc()) for n in range(parser.num_errors))
        raise EngineError(
            f"{graph.name} does not fit the plan: {said or 'the library gives no reason'}; build "
            "it again"
        )
    if missing := list(refitter.get_missing_weights()):
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise EngineError(
            f"{graph.name} has no weights for {', '.join(map(str, missing[:_MOST_NAMED]))}{more}; "
            "build the plan again"
        )
    if not refitter.refit_cuda_engine():
        raise EngineError(f"the library refuses the weights of {graph.name}; build the plan again")
