"""What other runtimes ask of a merged model, and what of a bundle they cannot run.

Sources: onnxruntime-genai 0.18 (its model builder and `src/models`), optimum-onnx 0.1
(`optimum/onnxruntime/modeling_decoder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headport.cache_ports import is_past, is_state
from headport.kernels import OPTION
from headport.manifest import Manifest, Port

__all__ = ["RUNTIMES", "CacheShape", "Runtime", "cache_shape", "faults"]


@dataclass(frozen=True)
class Runtime:
    """A runtime that loads a merged model."""

    name: str
    title: str
    targets: tuple[str, ...]  # of bundles it can run once merged
    padding: Literal["left", "right"]  # the side on which batches are padded for it
    options: str  # which session options it opens the model with


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime(
            "genai",
            "onnxruntime-genai",
            ("portable", "ort-cpu"),
            "right",
            "the bundle's session options, which genai_config.json holds: all graph optimisations, "
            "no provider options, as many threads as half the cores (at most 16)",
        ),
        Runtime(
            "optimum",
            "Optimum",
            ("portable",),
            "left",
            "ONNX Runtime's defaults unless `session_options` is given: all graph optimisations, "
            "and DequantizeLinear → MatMul may become a kernel that rounds activations",
        ),
    )
}


@dataclass(frozen=True)
class CacheShape:
    """What one cache port holds for each token."""

    heads: int
    size: int


def cache_shape(manifest: Manifest) -> CacheShape:
    """Heads and size per head of the first cache."""
    port = next(p for p in manifest.backbone.inputs if is_past(p.name))
    return _shape(port)


def _shape(port: Port) -> CacheShape:
    return CacheShape(int(port.shape[1]), int(port.shape[3]))


def faults(manifest: Manifest, config: Mapping[str, Any], runtimes: Sequence[Runtime]) -> list[str]:
    """Everything that keeps a bundle from being merged for these runtimes, each by its name.

    Args:
        manifest: The bundle's.
        config: Its `config.json`.
        runtimes: What shall load the merged model.
    """
    found = [*_bundle_faults(manifest)]
    if found:
        return found
    for runtime in runtimes:
        if manifest.target not in runtime.targets:
            found.append(
                f"{runtime.title} pads batches on the left or grows its caches, which a bundle "
                f"lowered to {manifest.target} cannot serve; merge the portable bundle for it"
            )
    names = [runtime.name for runtime in runtimes]
    if "genai" in names:
        found += _genai_faults(manifest)
    if "optimum" in names:
        found += _optimum_faults(manifest, config)
    return found


def _bundle_faults(manifest: Manifest) -> Iterator[str]:
    vocabulary, heads = manifest.vocabulary, manifest.heads
    if vocabulary.map is not None or vocabulary.kept_size is not None:
        yield (
            "its vocabulary is pruned, and neither runtime maps ids back; merge the bundle it was "
            "pruned from"
        )
    known = sorted({target for runtime in RUNTIMES.values() for target in runtime.targets})
    if manifest.target not in known:
        yield f"it is lowered to {manifest.target}; a {' or '.join(known)} bundle can be merged"
    if OPTION in manifest.session_options:
        yield (
            "it was lowered with --kernels, and neither runtime is given that library; lower it "
            "without, or merge the portable bundle"
        )
    if list(heads) != ["lm"]:
        yield f"one head `lm` was expected, it has {', '.join(heads) or 'none'}"
    if manifest.task_heads:
        yield (
            f"its heads {', '.join(manifest.task_heads)} have no place in a model.onnx of these "
            "runtimes; run it with headport.runtime.Heads"
        )
    if manifest.model.dtype == "bf16":
        yield "it computes in bfloat16, which no check on this machine can run; export fp32 or fp16"
    ports = [port for port in manifest.backbone.inputs if is_past(port.name)]
    states = sorted({port.name.partition(".")[0] for port in ports if is_state(port.name)})
    if states:
        kinds = ", ".join(states)
        yield f"it keeps states of recurrent layers ({kinds}), which neither runtime has"
    if not ports:
        yield "its backbone has no cache"
    if manifest.target == "ort-cpu" and not _takes_ragged_rows(manifest):
        yield (
            "it is lowered for ONNX Runtime 1.30, whose attention takes rows of one length only; "
            "lower it for 1.32, or merge the portable bundle"
        )
    for name, head in heads.items():
        if head.outputs == "candidates" and head.candidates is None:
            yield f"head {name} gives candidates and names no graph that gives all logits"


def _takes_ragged_rows(manifest: Manifest) -> bool:
    return any(port.name == "query_seqlens" for port in manifest.backbone.inputs)


def _genai_faults(manifest: Manifest) -> Iterator[str]:
    ports = [port for port in manifest.backbone.inputs if is_past(port.name)]
    layers = sorted({int(port.name.split(".")[1]) for port in ports})
    if layers != list(range(len(layers))):
        yield f"onnxruntime-genai numbers caches without gaps, these are of layers {layers}"
    shapes = {_shape(port) for port in ports}
    if len(shapes) > 1:
        listed = ", ".join(f"{s.heads} × {s.size}" for s in sorted(shapes, key=repr))
        yield f"onnxruntime-genai makes all caches alike, these hold heads × size {listed}"


# Model types whose key heads Optimum takes from `num_key_value_heads`; for all others it makes one
# per query head. Falcon, GPT-BigCode, Gemma 3 and DeepSeek have rules of their own there.
_GROUPED = (
    "arcee",
    "cohere",
    "gemma",
    "gemma3_text",
    "glm",
    "gpt_oss",
    "granite",
    "helium",
    "llama",
    "mistral",
    "nemotron",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
)
_HEAD_DIM = ("gemma", "gemma3_text", "gpt_oss", "nemotron")
_OWN_RULES = ("deepseek_v3", "falcon", "gemma3", "gpt_bigcode")


def _optimum_faults(manifest: Manifest, config: Mapping[str, Any]) -> Iterator[str]:
    found = cache_shape(manifest)
    expected = _optimum_shape(config)
    if expected is not None and expected != found:
        kind = config.get("model_type")
        yield (
            f"Optimum gives a model of type {kind!r} caches of {expected.heads} heads × "
            f"{expected.size}, this one takes {found.heads} × {found.size}; merge it for genai"
        )


def _optimum_shape(config: Mapping[str, Any]) -> CacheShape | None:
    kind = config.get("model_type")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    if kind in _OWN_RULES or heads is None or hidden is None:
        return None  # ONNX Runtime refuses a cache of a wrong shape when it is run
    size = config.get("head_dim") if kind in _HEAD_DIM else hidden // heads
    keys = config.get("num_key_value_heads", heads) if kind in _GROUPED else heads
    return None if size is None else CacheShape(int(keys), int(size))


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((int(config[name]) for name in names if config.get(name) is not None), None)
