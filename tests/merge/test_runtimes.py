"""What cannot be merged is refused, all of it at once, each by its name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headport.bundle import Bundle
from headport.manifest import Manifest, Port
from headport.merge.runtimes import RUNTIMES, CacheShape, cache_shape, faults

BOTH = list(RUNTIMES.values())
GENAI, OPTIMUM = [RUNTIMES["genai"]], [RUNTIMES["optimum"]]
CONFIG = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"hidden_size": 64}


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Any) -> Manifest:
    return Bundle.open(tiny_bundle, verify=False).manifest


def with_ports(manifest: Manifest, rename: dict[str, Port]) -> Manifest:
    backbone = manifest.graphs["backbone"]
    inputs = tuple(rename.get(port.name, port) for port in backbone.inputs)
    changed = msgspec.structs.replace(backbone, inputs=inputs)
    return msgspec.structs.replace(manifest, graphs=manifest.graphs | {"backbone": changed})


def with_input(manifest: Manifest, port: Port) -> Manifest:
    backbone = manifest.graphs["backbone"]
    changed = msgspec.structs.replace(backbone, inputs=(*backbone.inputs, port))
    return msgspec.structs.replace(manifest, graphs=manifest.graphs | {"backbone": changed})


def cache(name: str, heads: int = 2, size: int = 16) -> Port:
    return Port(name=name, dtype="float", shape=("batch", heads, "past_sequence", size))


def test_a_plain_bundle_has_no_fault(manifest: Manifest) -> None:
    assert not faults(manifest, CONFIG, BOTH)
    assert cache_shape(manifest) == CacheShape(2, 16)


def test_faults_of_the_bundle(manifest: Manifest) -> None:
    pruned = msgspec.structs.replace(manifest.vocabulary, kept_size=9, map="vocab_map.npy")
    broken = msgspec.structs.replace(manifest, vocabulary=pruned, target="ort-cuda", heads={})
    found = faults(broken, CONFIG, GENAI)
    assert len(found) == 3
    assert "pruned" in found[0] and "ort-cuda" in found[1] and "has none" in found[2]


def test_kernels_that_no_other_runtime_is_given(manifest: Manifest) -> None:
    options = {**manifest.session_options, "headport.kernels": "3"}
    [found] = faults(msgspec.structs.replace(manifest, session_options=options), CONFIG, GENAI)
    assert "--kernels" in found


def test_bfloat16(manifest: Manifest) -> None:
    model = msgspec.structs.replace(manifest.model, dtype="bf16")
    [found] = faults(msgspec.structs.replace(manifest, model=model), CONFIG, BOTH)
    assert "bfloat16" in found


def test_states(manifest: Manifest) -> None:
    state = Port(name="past_conv_states.1", dtype="float", shape=("batch", 8, 3))
    changed = with_ports(manifest, {"past_key_values.1.key": state})
    [found] = faults(changed, CONFIG, BOTH)
    assert "past_conv_states" in found


def test_a_lowered_bundle_is_for_genai_only(manifest: Manifest) -> None:
    lowered = msgspec.structs.replace(manifest, target="ort-cpu")
    [older] = faults(lowered, CONFIG, GENAI)
    assert older.startswith("it is lowered for ONNX Runtime 1.30")
    lowered = with_input(lowered, Port(name="query_seqlens", dtype="int32", shape=("batch",)))
    assert not faults(lowered, CONFIG, GENAI)
    [found] = faults(lowered, CONFIG, BOTH)
    assert found.startswith("Optimum") and "ort-cpu" in found


def test_caches_that_genai_cannot_name_or_make(manifest: Manifest) -> None:
    later = {
        f"past_key_values.1.{kind}": cache(f"past_key_values.3.{kind}") for kind in ("key", "value")
    }
    [found] = faults(with_ports(manifest, later), CONFIG, GENAI)
    assert "layers [0, 3]" in found
    assert not faults(with_ports(manifest, later), CONFIG, OPTIMUM)
    wide = {"past_key_values.1.value": cache("past_key_values.1.value", size=24)}
    [found] = faults(with_ports(manifest, wide), CONFIG, GENAI)
    assert "2 × 16, 2 × 24" in found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"model_type": "gemma2"}, "4 heads × 16, this one takes 2 × 16"),
        ({"num_key_value_heads": 1}, "1 heads × 16, this one takes 2 × 16"),
        ({"hidden_size": 128}, "2 heads × 32, this one takes 2 × 16"),
        ({"model_type": "nemotron", "hidden_size": 128, "head_dim": 16}, None),
        ({"model_type": "falcon", "hidden_size": 128}, None),  # a rule of its own, not judged here
        ({"hidden_size": None}, None),
        ({"num_attention_heads": None, "n_head": 4, "hidden_size": None, "n_embd": 64}, None),
    ],
)
def test_the_caches_that_optimum_will_make(
    manifest: Manifest, changes: dict[str, Any], expected: str | None
) -> None:
    found = faults(manifest, CONFIG | changes, OPTIMUM)
    assert (expected is None and not found) or (expected or "") in found[0]
