"""A user's own module: exported, quantised, lowered, run and validated like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import own_model as example
from headport.bundle import Bundle
from headport.cli import main
from headport.errors import CheckpointError
from headport.export import own_model as room
from headport.export.checkpoint import find_checkpoint, load_model
from headport.runtime import Generator

FACTORY = "examples.own_model:load"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "weights"
    assert example.main([str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def _where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_MODEL", str(folder))
    room.own_model.cache_clear()


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundle") / "own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWN_MODEL", str(folder))
        room.own_model.cache_clear()
        assert main(["export", FACTORY, "-o", str(output), "--quiet"]) == 0
    return output


def test_the_example_goes_all_the_way(bundle: Path, tmp_path: Path) -> None:
    int8, lowered = tmp_path / "int8", tmp_path / "lowered"
    assert main(["quantize", str(bundle), "-o", str(int8), "--head", "int8", "--quiet"]) == 0
    assert main(["lower", str(int8), "-o", str(lowered), "--target", "ort-cpu", "--quiet"]) == 0
    [reply] = Generator(lowered).generate(["Once upon"], max_new_tokens=5, temperature=0)
    assert len(reply.token_ids) == 5


def test_it_is_validated_against_the_function(bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The head is the last matrix of a language model.\n" * 3)
    arguments = ["validate", str(bundle), "--reference", FACTORY, "--text", str(text)]
    assert main([*arguments, "--greedy-tokens", "4", "--quiet"]) == 0


def test_the_manifest_says_where_it_came_from(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    assert manifest.provenance.checkpoint == FACTORY
    assert manifest.provenance.format == "python"
    assert len(manifest.provenance.sha256) == 64
    assert manifest.model.architecture == "OwnLM"
    assert manifest.heads["lm"].bias
    report = manifest.provenance.stages[0].report
    assert report["attention_windows"] == [0, 16]
    assert report["weights"]["name"] == "loaded"
    assert report["parameters_in_no_graph"] == []


def test_attention_is_what_its_definition_says() -> None:
    # Two tokens, one head: the second one sees both, unless the window keeps it to itself.
    query = torch.tensor([[[[1.0], [1.0]]]])
    key = torch.tensor([[[[0.0], [2.0]]]])
    value = torch.tensor([[[[1.0], [3.0]]]])
    model = load_model(find_checkpoint(FACTORY))
    context = room.Context(None, None, model.config, model)
    y = room.attend(query, key, value, context, 0, scale=1.0).float()
    second = float((1 + 3 * np.exp(2)) / (1 + np.exp(2)))
    torch.testing.assert_close(y.flatten(), torch.tensor([1.0, second]), rtol=1e-6, atol=1e-6)
    alone = room.attend(query, key, value, context, 0, window=1)
    assert alone.flatten().tolist() == [1.0, 3.0]
    capped = room.attend(query, key, value, context, 0, scale=1.0, softcap=1.0)
    weight = np.exp(np.tanh(2.0))
    assert capped.flatten()[1].item() == pytest.approx((1 + 3 * weight) / (1 + weight), rel=1e-6)


def test_its_cache_continues_where_it_stopped() -> None:
    model = load_model(find_checkpoint(FACTORY))
    ids = torch.arange(20)[None] % 7
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :13], use_cache=True)
        rest = model(ids[:, 13:], use_cache=True, cache=first.cache)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('no weights here')", "RuntimeError: no weights here"),
        ("return 3", "OwnModel was expected, it returned int"),
        ("return replace(good(), head=good().embedding.__class__(3, 4))", "head is not a part"),
        ("return replace(good(), tokenizer=Path('nowhere'))", "no tokenizer.json in nowhere"),
        ("return replace(good(), layers=0)", "at least 1"),
    ],
)
def test_a_function_that_does_not_fit_is_named(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"faulty_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        "from dataclasses import replace\nfrom pathlib import Path\n"
        f"from examples.own_model import load as good\ndef load():\n    {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match=f"{name}:load: .*{message}"):
        find_checkpoint(f"{name}:load")
    sys.modules.pop(name, None)


def test_a_module_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "no.such.package:load", "-o", "unused"]) == 2
    assert "no.such.package:load: the function cannot be called" in capsys.readouterr().err
