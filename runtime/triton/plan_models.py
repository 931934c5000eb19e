"""Models of the tensorrt backend: the plans that a bundle carries, each for itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from headport.bundle import Bundle
from headport.engines import STRIPPED, EngineRecord, read_engines, strangers
from headport.errors import UsageError
from headport.runtime.triton.graph_models import graph_model_name
from headport.runtime.triton.model_config import GraphServing, encode
from headport.runtime.triton.repository import ModelFiles

__all__ = ["tensorrt_models"]

_FILE = "model.plan"
_ANY = -1  # a size that a profile gives, as the parsed network says it


def tensorrt_models(bundle: Bundle, name: str, serving: GraphServing) -> list[ModelFiles]:
    """One model per plan.

    Args:
        bundle: From `headport engine --backend tensorrt`.
        name: Before the graphs' names.
        serving: How they are served, on GPUs; no more rows than a plan was built for.

    Raises:
        UsageError: If the bundle carries no plans, or they are not such as the backend loads.
    """
    records = read_engines(bundle)
    faults = [] if records else ["it carries no plans"]
    for record in records.values():
        faults += _faults(bundle, record)
    if faults:
        raise UsageError(
            f"{bundle.path}: {'; '.join(faults)}; build them with `headport engine --backend "
            "tensorrt`, with the TensorRT version of the Triton release"
        )
    return [_model(bundle, name, serving, record) for record in records.values()]


def _faults(bundle: Bundle, record: EngineRecord) -> Iterable[str]:
    yield from strangers(bundle, record)
    if record.backend != "tensorrt":
        yield f"{record.plan} was built with {record.backend}, Triton's backend is TensorRT"
    if STRIPPED in record.flags:
        yield f"{record.plan} holds no weights, and Triton puts none in"


def _model(bundle: Bundle, name: str, serving: GraphServing, record: EngineRecord) -> ModelFiles:
    model = graph_model_name(name, record.graph)
    instances = replace(serving.instances, profiles=len(record.profiles))
    rows = min(serving.max_batch_size, _largest_batch(record))
    own = replace(serving, instances=instances, max_batch_size=rows)
    config = {**own.message(model, record.inputs, record.outputs, _ANY), "backend": "tensorrt"}
    plan = bundle.file(record.plan)
    return ModelFiles(model, encode(config), lambda to: _copy(plan, to / _FILE))


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _largest_batch(record: EngineRecord) -> int:
    """Rows that at least one profile takes of every input."""
    largest = (min(high[0] for _, _, high in p.shapes.values()) for p in record.profiles)
    return max(largest, default=1)
