"""`headport triton`: a bundle as models in a repository that NVIDIA's Triton serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from headport.bundle import Bundle, refuse_overlap
from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.errors import UsageError
from headport.runtime.exact_option import ExactChoice
from headport.runtime.triton.graph_models import onnxruntime_models
from headport.runtime.triton.model_config import GraphServing, Instances, check_name
from headport.runtime.triton.plan_models import tensorrt_models
from headport.runtime.triton.python_backend import python_model
from headport.runtime.triton.repository import ModelFiles, write_models
from headport.runtime.triton.service_options import ServiceOptions

__all__ = ["SUMMARY", "Options", "Written", "run", "triton"]

SUMMARY = "Write a bundle as models in a repository that NVIDIA's Triton serves."

_GRAPH_BACKENDS = {"onnxruntime": onnxruntime_models, "tensorrt": tensorrt_models}
_SERVICE = ServiceOptions()


class Options(OptionRecord, frozen=True):
    """Options of `headport triton`."""

    bundle: Annotated[Path, positional("the bundle's folder")]
    output: Annotated[
        Path, option("model repository; models that it holds stay", flag="-o", metavar="REPOSITORY")
    ]
    backend: Annotated[
        Literal["python", "onnxruntime", "tensorrt"],
        option("python generates text; the others serve graphs, without a state"),
    ] = "python"
    name: Annotated[str | None, option("of the model; else the bundle folder's name")] = None
    version: Annotated[int, option("of the model; Triton serves the largest")] = 1
    instances: Annotated[int, option("copies that run, each with weights of its own")] = 1
    gpus: Annotated[
        tuple[int, ...], option("GPUs that they run on (default: by the bundle)", metavar="GPU")
    ] = ()
    whole_replies: Annotated[
        bool, option("python: one response to a request, for clients that take no streams")
    ] = False
    environment: Annotated[
        str | None,
        option("python: virtual environment with headport, as Triton sees it", metavar="FOLDER"),
    ] = None
    slots: Annotated[
        int, option("python: rows worked on at once; 0 = as memory allows, at most 16")
    ] = _SERVICE.slots
    max_context: Annotated[
        int, option("python: tokens of a prompt and its reply; 0 = the model's")
    ] = _SERVICE.max_context
    max_new_tokens: Annotated[int, option("python: tokens of one reply, at most")] = (
        _SERVICE.max_new_tokens
    )
    max_replies: Annotated[int, option("python: replies to one request, at most")] = (
        _SERVICE.max_replies
    )
    max_waiting: Annotated[int, option("python: rows that may wait for a slot")] = (
        _SERVICE.max_waiting
    )
    prefill_chunk: Annotated[int, option("python: prompt tokens run before others' turn")] = (
        _SERVICE.prefill_chunk
    )
    threads: Annotated[int, option("python: ONNX Runtime threads, 0 = all cores")] = (
        _SERVICE.threads
    )
    exact: Annotated[
        ExactChoice, option("python: tokens as the unquantised head gives them; see generate")
    ] = _SERVICE.exact
    timeout: Annotated[float, option("python: seconds for one request, waiting included")] = (
        _SERVICE.timeout
    )
    max_batch_size: Annotated[int, option("graphs: rows that Triton joins, at most")] = 8
    queue_delay: Annotated[
        int, option("graphs: microseconds that it waits for more", metavar="US")
    ] = 100
    force: Annotated[bool, option("replace this version of the model")] = False


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    repository: str
    backend: str
    models: tuple[str, ...]
    version: int
    streams: bool  # tokens come one by one


# Fields that only one kind of backend reads.
_OF_PYTHON = (
    *ServiceOptions.__struct_fields__,
    *("whole_replies", "environment"),
)
_OF_GRAPHS = ("max_batch_size", "queue_delay")


def triton(options: Options) -> Written:
    """Write the models, all of them or none.

    Raises:
        UsageError: If an option is wrong or has no effect, or the bundle is not for this backend.
        BundleError: If the bundle is damaged.
        OutputError: If the repository cannot be written, or holds this version.
        ParityError: If the graphs answer otherwise as the backend opens them.
    """
    _check(options)
    repository = options.output.absolute()
    refuse_overlap(options.bundle, repository)
    bundle = Bundle.open(options.bundle)
    name = options.name or options.bundle.resolve().name
    check_name(name)
    models = _models(bundle, name, options)
    write_models(repository, models, options.version, force=options.force)
    return Written(
        repository=str(options.output),
        backend=options.backend,
        models=tuple(model.name for model in models),
        version=options.version,
        streams=options.backend == "python" and not options.whole_replies,
    )


def _models(bundle: Bundle, name: str, options: Options) -> list[ModelFiles]:
    on_gpu = options.backend == "tensorrt" or bundle.manifest.target == "ort-cuda"
    instances = Instances(options.instances, options.gpus or ((0,) if on_gpu else ()))
    if options.backend == "python":
        service = ServiceOptions(
            **{field: getattr(options, field) for field in ServiceOptions.__struct_fields__}
        )
        return [
            python_model(
                bundle,
                name,
                service=service,
                instances=instances,
                whole_replies=options.whole_replies,
                environment=options.environment,
            )
        ]
    serving = GraphServing(instances, options.max_batch_size, options.queue_delay)
    return _GRAPH_BACKENDS[options.backend](bundle, name, serving)


def _check(options: Options) -> None:
    check_least(
        options,
        {
            **dict.fromkeys(("version", "instances", "max_new_tokens", "max_replies"), 1),
            **dict.fromkeys(("max_waiting", "prefill_chunk", "max_batch_size"), 1),
            **dict.fromkeys(("slots", "max_context", "threads", "queue_delay"), 0),
        },
    )
    if not options.timeout > 0:
        raise UsageError(f"--timeout: above 0 expected, {options.timeout:g} given")
    others = _OF_GRAPHS if options.backend == "python" else _OF_PYTHON
    defaults = {field.name: field.default for field in msgspec.structs.fields(options)}
    idle = [name for name in others if getattr(options, name) != defaults[name]]
    if idle:
        listed = ", ".join("--" + name.replace("_", "-") for name in idle)
        raise UsageError(f"{listed}: no effect with --backend {options.backend}; leave it out")
    if options.backend == "python" and any(options.gpus):
        raise UsageError(
            f"--gpus {' '.join(map(str, options.gpus))}: headport runs on the first GPU that it "
            "sees, 0 was expected; start a server for each GPU"
        )


def run(options: Options) -> Outcome:
    """Write and say how to start it."""
    written = triton(options)
    how = "streams tokens" if written.streams else "one response to a request"
    text = (
        f"{written.repository}: {', '.join(written.models)}, version {written.version}, "
        f"{written.backend} backend, {how}\n"
        f"tritonserver --model-repository={written.repository}"
    )
    return Outcome(text, written)
