"""`exact=True` on real bundles: the tokens of the float32 head, and refusal of what is broken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.runtime import Generator

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cold": {"temperature": 0.8, "seed": 3},
    "hot": {"temperature": 1.5, "seed": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.3, "seed": 3},
    "top_k": {"temperature": 1.0, "top_k": 12, "seed": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.2, "seed": 3},
}
PROMPTS = [[5, 9, 2], [17], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def certified(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model with a certified head: portable and lowered."""
    from headport.lowering import Options as LowerOptions
    from headport.lowering import lower
    from headport.quantize import Options, quantize

    folder = tmp_path_factory.mktemp("certified")
    options = Options(
        bundle=tiny_bundle, output=folder / "int8", head="int8", block=16, certify=True
    )
    portable = quantize(options).path
    lowered = lower(LowerOptions(bundle=portable, output=folder / "cpu", target="ort-cpu")).path
    return {"portable": portable, "ort-cpu": lowered}


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> dict[str, list[list[int]]]:
    return {name: _tokens(Generator(tiny_bundle), options) for name, options in MODES.items()}


def _tokens(generator: Generator, options: dict[str, Any]) -> list[list[int]]:
    found = generator.generate(PROMPTS, max_new_tokens=24, eos_token_id=(), **options)
    return [each.token_ids for each in found]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["portable", "ort-cpu"])
def test_tokens_are_those_of_the_float32_head(
    certified: dict[str, Path], expected: dict[str, list[list[int]]], target: str, mode: str
) -> None:
    generator = Generator(certified[target], exact=True)
    assert _tokens(generator, MODES[mode]) == expected[mode]
    stats = generator.stats
    assert stats.certified + stats.fallbacks == stats.new_tokens == 72
    if mode in ("greedy", "cold", "hot", "top_k"):
        assert stats.fallbacks == 0


RULES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "rewards": {"repetition_penalty": 0.9, "logit_bias": {7: 1.5, 60: -2.0}},
    "bans": {"no_repeat_ngram_size": 1, "bad_words": [[12], [40, 41]]},
    "few allowed": {"allowed": [100, 101, 102]},
    "many allowed": {"allowed": list(range(0, 256, 3))},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_processed_tokens_are_those_of_the_float32_head(
    certified: dict[str, Path], tiny_bundle: Path, rules: dict[str, Any]
) -> None:
    exact, full = Generator(certified["ort-cpu"], exact=True), Generator(tiny_bundle)
    for options in MODES.values():
        assert _tokens(exact, {**options, **rules}) == _tokens(full, {**options, **rules})
    modes = exact.stats.modes
    for mode in ("greedy", "temperature", "top_k"):
        assert modes[f"{mode}, processed"]["certified"] > 60, mode


def test_exact_is_the_default_of_a_certified_bundle(
    certified: dict[str, Path], tiny_bundle: Path
) -> None:
    assert Generator(certified["portable"]).exact and not Generator(tiny_bundle).exact
    assert not Generator(certified["portable"], exact=False).exact


def test_logits_are_the_float32_heads_own(certified: dict[str, Path], tiny_bundle: Path) -> None:
    found = Generator(certified["portable"]).logits(PROMPTS[2])
    assert (found == Generator(tiny_bundle).logits(PROMPTS[2])).all()


def test_a_bundle_whose_bound_was_changed_is_refused_at_load(
    certified: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(certified["ort-cpu"], folder)
    manifest = Bundle.open(folder).manifest
    entry = next(t for t in manifest.tensors if t.name == "certificate.bounds")
    array = np.memmap(folder / entry.file, np.float32, "r+", entry.offset, entry.shape)
    array /= 2
    array.flush()
    with pytest.raises(BundleError, match=r"data/.*changed"):  # its checksum
        Generator(folder)
    with pytest.raises(BundleError, match="certificate BROKEN"):
        Generator(folder, verify=False)
    assert Generator(folder, verify=False, exact=False).generate("a", max_new_tokens=2)


@pytest.mark.parametrize(("exact", "proved"), [("auto", 4), ("always", 4), ("never", 4)])
def test_the_command_says_how_its_tokens_were_chosen(
    certified: dict[str, Path], exact: Any, proved: int
) -> None:
    from headport.runtime.command import Options, run

    outcome = run(Options(bundle=certified["ort-cpu"], prompt="ab", exact=exact, max_new_tokens=4))
    stats = outcome.document["stats"]
    assert stats["certified"] == proved and stats["modes"]["greedy"]["fallbacks"] == 0


def test_the_command_refuses_exact_without_a_certificate(tiny_bundle: Path) -> None:
    from headport.runtime.command import Options, run

    with pytest.raises(BundleError, match="need a certified head"):
        run(Options(bundle=tiny_bundle, prompt="ab", exact="always"))
