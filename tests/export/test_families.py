"""Families are exported as they are, or refused by name.

`export` compares the written files with PyTorch before it says success; these tests look at what
was found and repeat the comparison on their own for one prompt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headport.errors import HeadportError
from headport.export.command import Options, export
from headport.runner import open_runner
from tests.conftest import VOCAB_SIZE, save_model
from tests.export.conftest import FamilyBundle
from tests.export.families import FAMILIES, SMALL


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exported_as_it_is(family: str, family_bundle: FamilyBundle) -> None:
    expected = FAMILIES[family][2]
    checkpoint, bundle = family_bundle(family)
    head = bundle.manifest.heads["lm"]
    assert {name: getattr(head, name) for name in expected} == pytest.approx(expected)
    assert head.weight in {tensor.name for tensor in bundle.manifest.tensors}
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = np.random.default_rng(11).integers(1, VOCAB_SIZE, (1, 20))
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids)).logits[0].numpy()
    runner = open_runner(bundle)
    hidden = runner.forward(runner.new_cache(1, 20), ids, np.array([20]))
    found = runner.head(hidden[0]).logits
    assert found is not None
    np.testing.assert_allclose(found, wanted, atol=2e-4 * max(1.0, np.abs(wanted).max()))


def test_gemma2_in_half_precision_keeps_softcaps_and_windows(
    tiny_gemma2: Path, tmp_path: Path
) -> None:
    # Its norms apply a float32 weight to half-precision input, which fuses into an ill-typed node.
    bundle = export(Options(model=str(tiny_gemma2), output=tmp_path / "bundle", dtype="fp16"))
    manifest = bundle.manifest
    head = manifest.heads["lm"]
    assert (head.softcap, head.tied, manifest.model.dtype) == (1.0, True, "fp16")
    report = manifest.provenance.stages[0].report
    assert sorted(report["attention_windows"]) == [0, 8]
    assert report["tensor_bytes"] <= 1.02 * report["parameter_bytes"]
    assert {t.dtype for t in manifest.tensors if len(t.shape) == 2} == {"float16"}


# family → config class, settings, what the refusal says
REFUSED = {
    "xlnet": (
        "XLNetConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48},
        "XLNetLMHeadModel is refused.*two streams",
    ),
    "llama4": ("Llama4TextConfig", SMALL, "Llama4ForCausalLM.*chunked"),
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1},
        "MambaForCausalLM.*recurrent state",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    family: str, tmp_path: Path
) -> None:
    kind, settings, reason = REFUSED[family]
    checkpoint = save_model(tmp_path / family, getattr(transformers, kind)(**settings))
    with pytest.raises(HeadportError, match=reason):
        export(Options(model=str(checkpoint), output=tmp_path / "bundle"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [family]
