"""Models of the onnxruntime backend: a bundle's graphs, each for itself and without a state.

The backbone takes ids, mask and all keys and values of the tokens before, and gives them back with
those of the new tokens; a head takes hidden states. Whoever generates with them keeps the caches
and chooses the tokens.
"""

from __future__ import annotations

import msgspec

from headport.bundle import Bundle, copy_files
from headport.errors import ParityError, UsageError
from headport.given_rows import refuse_embeddings
from headport.runtime.triton.model_config import GraphServing, encode
from headport.runtime.triton.repository import ModelFiles
from headport.selftest import run_selftest

__all__ = ["check_default_options", "graph_model_name", "onnxruntime_models"]


def graph_model_name(name: str, graph: str) -> str:
    """A graph's model: `head.lm` of `smol` is `smol_head_lm`."""
    return f"{name}_{graph.replace('.', '_')}"


def onnxruntime_models(bundle: Bundle, name: str, serving: GraphServing) -> list[ModelFiles]:
    """One model per graph.

    Args:
        bundle: Portable: its graphs ask for nothing but tensors.
        name: Before the graphs' names.
        serving: How they are served.

    Raises:
        UsageError: If the bundle is lowered, or has a learnt prefix.
        ParityError: If it answers otherwise under the session options that the backend sets.
    """
    target = bundle.manifest.target
    if target != "portable":
        raise UsageError(
            f"{bundle.path} is lowered to {target}, whose caches are written in place, which a "
            "server without a state cannot do; give the portable bundle, or use --backend "
            + ("tensorrt" if target == "tensorrt" else "python")
        )
    refuse_embeddings(bundle, "serving graphs without a state", "export without it")
    bundle.require_no_prefix("serving graphs without a state", "use --backend python")
    check_default_options(bundle)
    return [_model(bundle, name, serving, graph) for graph in bundle.manifest.graphs]


def _model(bundle: Bundle, name: str, serving: GraphServing, graph_name: str) -> ModelFiles:
    graph = bundle.manifest.graphs[graph_name]
    model = graph_model_name(name, graph_name)
    batch = "batch" if graph.role == "backbone" else "rows"
    config = {
        **serving.message(model, graph.inputs, graph.outputs, batch),
        "backend": "onnxruntime",
        "default_model_filename": graph.file,
    }
    files = _files(bundle, graph_name)
    return ModelFiles(model, encode(config), lambda to: copy_files(bundle.path, files, to))


def _files(bundle: Bundle, graph_name: str) -> list[str]:
    tensors = {
        tensor.file
        for tensor in bundle.manifest.tensors
        if any(user.startswith(f"{graph_name}:") for user in tensor.consumers)
    }
    return [bundle.manifest.graphs[graph_name].file, *sorted(tensors)]


def check_default_options(bundle: Bundle) -> None:
    """Hold the bundle's self-test against ONNX Runtime's own session options.

    The backend hands on none of those that a bundle lists.

    Raises:
        ParityError: If answers are outside of the self-test's tolerance.
    """
    manifest = msgspec.structs.replace(bundle.manifest, session_options={})
    found = run_selftest(Bundle(bundle.path, manifest))
    if not found:
        errors = ", ".join(f"{head} {error:.2e}" for head, error in found.logits_error.items())
        raise ParityError(
            "under ONNX Runtime's default session options, which Triton's onnxruntime backend "
            f"uses, the bundle answers otherwise: max |Δ| of hidden states "
            f"{found.hidden_states_error:.2e} ({found.tolerance.hidden_states:.2e} is accepted), "
            f"of logits {errors} ({found.tolerance.logits:.2e}); nothing was written. Use "
            "--backend python"
        )
