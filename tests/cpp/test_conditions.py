"""Conditions and forced tokens in C++: what Python gives, and refused where wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.export.heads import ConditionProjection, save_condition
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.runtime import Generator
from tests.conftest import llama_config, save_model
from tests.cpp.conftest import failed
from tests.cpp.served import EXTRA, same
from tests.cpp.test_heads_and_beams import cpp

PROMPTS = [[5, 9, 2], [17], [40, 41, 42, 43]]
GIVEN = ["formal", None, [0.3, -1.0, 2.0, 0.1, -0.4]]
ALL: dict[str, Any] = {"conditions": ["casual"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3, "n": 2},
    "processed": {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 9, "seed": 4},
    "beams": {"num_beams": 3, "n": 3},
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ort-cpu bundles that take conditions, by what is particular about them."""
    folder = tmp_path_factory.mktemp("conditions")
    torch.manual_seed(3)
    projection = ConditionProjection(5, 64)
    torch.nn.init.normal_(projection.linear.weight)
    fixed = {"formal": torch.tensor([1.0, 0, 0, 2, 0]), "casual": torch.tensor([0.0, 3, 0, 0, 1])}
    save_condition(projection, folder / "style.safetensors", fixed)
    model = save_model(folder / "model", llama_config(num_hidden_layers=1))

    def exported(dtype: str) -> Path:
        asked = ExportOptions(
            model=str(model),
            output=folder / dtype,
            dtype=dtype,
            condition=folder / "style.safetensors",
        )
        return export(asked).path

    def lowered(bundle: Path) -> Path:
        output = folder / f"{bundle.name}-cpu"
        return lower(LowerOptions(bundle=bundle, output=output, target="ort-cpu")).path

    whole, half = exported("fp32"), exported("fp16")
    asked = QuantizeOptions(
        bundle=whole, output=folder / "exact", head="int8", block=16, certify=True
    )
    return {
        "fp32": lowered(whole),
        "fp16": lowered(half),
        "certified": lowered(quantize(asked).path),
    }


@pytest.mark.parametrize("kind", ["fp32", "fp16", "certified"])
def test_replies_under_conditions_are_those_of_python(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    asked = [
        {"prompts": PROMPTS, "options": {"max_new_tokens": 10} | options} | conditions
        for options in OPTIONS.values()
        for conditions in ({"conditions": GIVEN}, ALL)
    ]
    found = cpp(build, onnxruntime, bundles[kind], asked, tmp_path)
    assert found["condition_size"] == 5 and found["conditions"] == ["casual", "formal"]
    with Generator(bundles[kind], threads=1) as generator:
        plain = generator.generate(PROMPTS, max_new_tokens=10)
        for each, given in zip(asked, found["requests"], strict=True):
            conditions = each["conditions"]
            wanted = generator.generate(
                PROMPTS,
                condition=conditions if len(conditions) > 1 else "casual",
                **each["options"],
            )
            ids = [reply["token_ids"] for reply in given["replies"]]
            assert ids == [reply.token_ids for reply in wanted], each["options"]
        stats = generator.stats
    first = [reply["token_ids"] for reply in found["requests"][0]["replies"]]
    assert first[1] == plain[1].token_ids and first[0] != plain[0].token_ids
    assert found["stats"]["condition_runs"] == stats.condition_runs == 2 + len(OPTIONS)
    if kind == "certified":
        assert found["stats"]["certified"] > 0 and found["exact"]


def test_the_service_takes_conditions(start: Any, bundles: dict[str, Path]) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 2}
    with start(bundle=bundles["fp32"]) as service, Generator(bundles["fp32"], threads=1) as python:
        for condition in (GIVEN, "casual", GIVEN[2]):
            extra = EXTRA | {"condition": condition}
            answer = service.ask(PROMPTS, extra_body=extra, **options)
            wanted = python.generate(
                PROMPTS, condition=condition, max_new_tokens=6, temperature=1.0, seed=2
            )
            same(answer.choices, wanted)


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (["fancy"], "request error: no condition 'fancy' in this bundle; known are casual, formal"),
        ([[1.0, 2.0]], "a name (casual, formal) or 5 numbers, 2 were given"),
        ([[]], "5 numbers, 0 were given"),
        ([[1e39, 0, 0, 0, 0]], "a condition's values must be finite, inf was given"),
        (["formal", "formal"], "one for each of the 3 prompts, was expected; 2 were given"),
    ],
)
def test_wrong_conditions_are_refused(
    build: Path,
    onnxruntime: Path,
    bundles: dict[str, Path],
    tmp_path: Path,
    conditions: list[Any],
    words: str,
) -> None:
    asked = [{"prompts": PROMPTS, "options": {}, "conditions": conditions}]
    assert words in cpp(build, onnxruntime, bundles["fp32"], asked, tmp_path)["refused"]


def test_a_bundle_that_takes_none_refuses_one(
    build: Path, onnxruntime: Path, tiny_lowered: Path, tmp_path: Path
) -> None:
    asked = [{"prompts": PROMPTS, "options": {}, "conditions": ["formal"]}]
    refused = cpp(build, onnxruntime, tiny_lowered, asked, tmp_path)["refused"]
    assert "request error: condition: this bundle takes none; export the model with" in refused


def test_hidden_states_of_another_size_are_refused(
    build: Path, onnxruntime: Path, tiny_lowered: Path, tmp_path: Path
) -> None:
    bundle = shutil.copytree(tiny_lowered, tmp_path / "other")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["model"]["hidden_size"] -= 1
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    refused = failed(build, onnxruntime, bundle, tmp_path)
    assert "the manifest says hidden states of 63 values, the backbone gives 64" in refused


def test_a_condition_beyond_float16_is_refused_there(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    asked = [{"prompts": PROMPTS, "options": {}, "conditions": [np.full(5, 1e6).tolist()]}]
    refused = cpp(build, onnxruntime, bundles["fp16"], asked, tmp_path)["refused"]
    assert "non-finite error: hidden state" in refused and "beyond float16" in refused


def test_forced_tokens_are_those_of_python(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    defaults = {"forced_bos_token_id": 33, "forced_eos_token_id": [7, 8]}
    asked = [{"prompts": PROMPTS, "options": {"max_new_tokens": 6} | o} for o in OPTIONS.values()]
    for kind in ("fp32", "certified"):
        bundle = shutil.copytree(bundles[kind], tmp_path / kind)
        manifest = json.loads((bundle / "manifest.json").read_text())
        manifest["defaults"] |= defaults
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        found = cpp(build, onnxruntime, bundle, asked, tmp_path)
        with Generator(bundle, threads=1) as generator:
            for options, given in zip(OPTIONS.values(), found["requests"], strict=True):
                wanted = generator.generate(PROMPTS, max_new_tokens=6, **options)
                ids = [reply["token_ids"] for reply in given["replies"]]
                assert ids == [reply.token_ids for reply in wanted], options
                assert all(each[-1] in (7, 8) for each in ids if len(each) == 6)
        ids = [reply["token_ids"][0] for reply in found["requests"][0]["replies"]]
        assert ids[1] == 33 and ids[0] != 33
