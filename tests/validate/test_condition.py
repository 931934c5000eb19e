"""Validation under a condition: both sides are told it, each from its own file."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headport.bundle import Bundle
from headport.cli import main
from headport.condition import CONDITION_FILE
from headport.errors import CheckpointError, HeadportError, UsageError
from headport.export.heads import ConditionProjection, save_condition
from headport.runtime import Generator
from headport.validate.candidate import Candidate
from headport.validate.command import Options, validate_with
from headport.validate.local_reference import LocalReference
from headport.validate.reference import Reference
from tests.validate.sabotage import sabotage

SIZE = 5


@pytest.fixture
def projection(conditioned_bundle: Path) -> Path:
    return conditioned_bundle.parent / "style.safetensors"


@pytest.fixture
def conditioned(conditioned_bundle: Path) -> Path:
    return conditioned_bundle


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("values") / "values.npy"
    np.save(file, np.array([0.3, -1.0, 2.0, 0.1, -0.4]))
    return file


def told(model: Path, projection: Path, condition: object) -> LocalReference:
    flags = (f"--projection={projection}", f"--condition={condition}")
    return LocalReference(Reference(str(model), *flags))


def options(bundle: Path, texts: tuple[Path, ...], **changes: Any) -> Options:
    small = {"max_tokens": 60, "greedy_tokens": 8, "attribution_tokens": 40}
    return Options(
        bundle=bundle,
        reference="",
        text=texts[:1],
        noise_floor_tokens=20,
        **(small | changes),
    )


@pytest.mark.parametrize("kind", ["name", "values"])
def test_both_sides_are_told_the_same(kind, conditioned, tiny_llama, projection, values, texts):
    condition = "formal" if kind == "name" else str(values)
    given = options(conditioned, texts, condition=condition, projection=projection)
    report = validate_with(told(tiny_llama, projection, condition), given)
    named = report.protocol.condition
    assert report.verdict == "passed"
    if kind == "name":
        assert named == "formal"
    else:  # by what it holds, so that other values in the same file are another condition
        shown = np.load(values).astype(np.float32).tobytes()
        assert named == f"{values.name} (sha256 {sha256(shown).hexdigest()[:16]})"
    assert report.attribution is not None
    assert max(part.kl_mean for part in report.attribution.parts) < 1e-9
    assert all(r.first_divergence is None or r.near_tie for r in report.slices[0].greedy)
    # It is a condition that shows: without it the same reference is another model.
    plain = msgspec.structs.replace(given, condition=None, projection=None)
    assert validate_with(told(tiny_llama, projection, condition), plain).verdict == "failed"


def test_the_bundle_answers_as_the_runtime_does(conditioned):
    ids = [5, 9, 200, 13]
    candidate = Candidate(Bundle.open(conditioned), 1, None, "casual")
    [states] = candidate.hidden_states([np.array(ids)])
    with Generator(conditioned, threads=1) as generator:
        wanted = generator.logits(ids, condition="casual")
        reply = generator.generate([ids], condition="casual", max_new_tokens=6, eos_token_id=())
    np.testing.assert_allclose(candidate.logits(states), wanted, atol=1e-5)
    found = candidate.continue_greedily(np.array([ids]), 6)
    assert found[0].tolist() == reply[0].token_ids


@pytest.mark.parametrize("tensor", ["weight", "bias", "fixed.formal"])
def test_another_projection_in_the_bundle_fails(
    tensor, conditioned, tiny_llama, projection, texts, tmp_path
):
    def fault(folder: Path) -> None:
        tensors = load_file(folder / CONDITION_FILE)
        tensors[tensor] = np.roll(tensors[tensor], 1, axis=0)
        save_file(tensors, folder / CONDITION_FILE)

    broken = sabotage(conditioned, tmp_path / "broken", fault)
    given = options(broken, texts, condition="formal", projection=projection, greedy_tokens=0)
    report = validate_with(told(tiny_llama, projection, "formal"), given)
    assert report.verdict == "failed"
    assert report.attribution is not None and report.attribution.largest == "backbone"


def test_wrong_use_is_named(conditioned, tiny_bundle, tiny_llama, projection, texts, capsys):
    def refused(*more: object, bundle: Path = conditioned) -> str:
        arguments = ["validate", bundle, "--reference", tiny_llama, "--text", texts[0], *more]
        assert main([str(each) for each in arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    both = ("--condition", "formal", "--projection", projection)
    assert "--projection: expected beside --condition" in refused("--condition", "formal")
    assert "--condition: expected beside --projection" in refused("--projection", projection)
    assert "takes none; export the model" in refused(*both, bundle=tiny_bundle)
    assert "--bisect: a condition changes no state" in refused(*both, "--bisect")
    missing = ("--condition", "none.npy", "--projection", projection)
    assert "--condition none.npy: no plain array" in refused(*missing)


@pytest.mark.parametrize(
    ("condition", "message"),
    [("rude", "no fixed condition 'rude' .* formal"), ("short.npy", "5 values were expected")],
)
def test_a_condition_that_the_file_does_not_hold_is_named(
    condition, message, tiny_llama, projection, tmp_path
):
    np.save(tmp_path / "short.npy", np.zeros(3))
    given = str(tmp_path / condition) if condition.endswith("npy") else condition
    with pytest.raises(CheckpointError, match=message):
        told(tiny_llama, projection, given)


def test_a_projection_for_another_model_is_named(tiny_llama, tmp_path):
    save_condition(ConditionProjection(SIZE, 48), tmp_path / "other.safetensors")
    np.save(tmp_path / "v.npy", np.zeros(SIZE))
    with pytest.raises(CheckpointError, match=r"hidden states of 48 values, the head .* reads 64"):
        told(tiny_llama, tmp_path / "other.safetensors", tmp_path / "v.npy")
    (tmp_path / "no.safetensors").write_text("none")
    with pytest.raises(HeadportError, match="a projection was expected"):
        told(tiny_llama, tmp_path / "no.safetensors", "formal")


def test_figures_under_another_condition_are_no_baseline(conditioned, texts):
    from headport.validate.baseline import check_comparable
    from tests.validate.reports import report

    plain = report()
    changed = msgspec.structs.replace(plain.protocol, condition="formal")
    with pytest.raises(UsageError, match="other condition"):
        check_comparable(plain, msgspec.structs.replace(plain, protocol=changed), Path("a.json"))
