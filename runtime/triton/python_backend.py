"""The model of the python backend: the bundle, and a `model.py` that hands requests to headport.

The whole bundle lies in the model's version, so that a repository can be moved or fetched from a
store; the service itself is `headport.runtime.triton.service`, of the headport that is installed
where Triton runs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from headport.bundle import MANIFEST, Bundle, copy_files
from headport.errors import UsageError
from headport.runtime.serve.prompts import check_prompts
from headport.runtime.triton import served_model
from headport.runtime.triton.model_config import Instances, encode, parameters, tensor
from headport.runtime.triton.repository import ModelFiles
from headport.runtime.triton.service_options import BUNDLE, PREFIX, ServiceOptions

__all__ = ["INPUTS", "OUTPUTS", "python_model"]

INPUTS = (
    tensor("text_input", "STRING", optional=True),
    tensor("input_ids", "INT64", (-1,), optional=True),
    tensor("messages", "STRING", optional=True),
    tensor("sampling_parameters", "STRING", optional=True),
)
STREAM = tensor("stream", "BOOL", optional=True)
OUTPUTS = (
    tensor("text_output", "STRING", (-1,)),
    tensor("output_ids", "INT64", (-1,)),
    tensor("reply_lengths", "INT64", (-1,)),
    tensor("finish_reason", "STRING", (-1,)),
    tensor("seed", "UINT64", (-1,)),
)
HEAD = "lm"
ENVIRONMENT = "EXECUTION_ENV_PATH"  # as the python backend names it


def python_model(
    bundle: Bundle,
    name: str,
    *,
    service: ServiceOptions,
    instances: Instances,
    whole_replies: bool,
    environment: str | None,
) -> ModelFiles:
    """A model that answers as `Generator` does.

    Args:
        bundle: Portable, or lowered to ONNX Runtime.
        name: Of the model.
        service: How the generator is made.
        instances: Copies, each a process with the weights of its own.
        whole_replies: One response to a request, as clients that know no streams expect.
        environment: Virtual environment that headport is installed in, as Triton sees it.

    Raises:
        UsageError: If the bundle is lowered to something that `Generator` does not open, has no
            head that chooses tokens, or answers to features.
    """
    if HEAD not in bundle.manifest.heads:
        raise UsageError(
            f"{bundle.path}: a head {HEAD!r} that chooses tokens was expected, found "
            f"{', '.join(bundle.manifest.heads) or 'none'}; serve its graphs with --backend "
            "onnxruntime"
        )
    if bundle.manifest.target == "tensorrt":
        raise UsageError(
            f"{bundle.path} is lowered to tensorrt; the python backend serves portable bundles and "
            "those of ort-cpu and ort-cuda, plans are for --backend tensorrt"
        )
    check_prompts(bundle, "the python backend")
    values: dict[str, Any] = {
        f"{PREFIX}{key}": value for key, value in msgspec.structs.asdict(service).items()
    }
    if environment is not None:
        values[ENVIRONMENT] = environment
    config = {
        "name": name,
        "backend": "python",
        # Requests are joined by the generator, between steps, and not by Triton before the first.
        "max_batch_size": 0,
        "input": [*INPUTS] if whole_replies else [*INPUTS, STREAM],
        "output": [*OUTPUTS],
        "instance_group": [instances.message()],
        "model_transaction_policy": {"decoupled": not whole_replies},
        "parameters": parameters(values),
    }

    def fill(folder: Path) -> None:
        shutil.copyfile(Path(served_model.__file__), folder / "model.py")
        copy_files(bundle.path, [MANIFEST, *bundle.manifest.files], folder / BUNDLE)

    return ModelFiles(name, encode(config), fill)
