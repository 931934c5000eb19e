"""Terms, ends, loops and certainty, by hand and on a real bundle."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headport.cli import main
from headport.errors import UsageError
from headport.validate.analysis.certainty import CertaintyOfSides, entropy
from headport.validate.analysis.command import Options, analyse_with
from headport.validate.analysis.ends import EndProbabilities
from headport.validate.analysis.loops import loop_period
from headport.validate.analysis.tables import render_lines, render_page
from headport.validate.analysis.terms import Watch, read_terms


def logits(*rows: tuple[float, ...]) -> np.ndarray:
    """Of these probabilities."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows)).astype(np.float32)


def test_a_term_is_watched_by_its_spellings_first_tokens() -> None:
    spellings = {"bad": [2, 0], " bad": [1], "good": [0], " good": [0]}
    watch = Watch(("good", "bad"), spellings.__getitem__)
    reference = logits((0.5, 0.3, 0.1, 0.1), (0.7, 0.1, 0.1, 0.1))
    candidate = logits((0.5, 0.3, 0.1, 0.1), (0.2, 0.5, 0.2, 0.1))
    watch.add(0, 5, (reference, candidate))
    bad, good = watch.terms(str, str)
    assert (bad.term, bad.tokens, good.tokens) == ("bad", ("1", "2"), ("0",))
    assert bad.reference.mean_probability == pytest.approx((0.4 + 0.2) / 2)
    assert bad.candidate.mean_probability == pytest.approx((0.4 + 0.7) / 2)
    assert bad.candidate.max_probability == pytest.approx(0.7)
    assert (bad.reference.best_rank, bad.candidate.best_rank) == (2, 1)
    assert bad.context == "(0, 6)", "the position of the largest probability"
    assert good.reference.in_top_10 == 2


def test_rank_counts_those_above_and_top_ten_cuts() -> None:
    z = np.arange(20, dtype=np.float32)[None]
    watch = Watch(
        ("rare", "common"), {"rare": [3], " rare": [3], "common": [12], " common": [12]}.__getitem__
    )
    watch.add(0, 0, (z, z))
    by_term = {t.term: t.reference for t in watch.terms(str, str)}
    assert (by_term["rare"].best_rank, by_term["rare"].in_top_10) == (17, 0)
    assert (by_term["common"].best_rank, by_term["common"].in_top_10) == (8, 1)


@pytest.mark.parametrize(
    ("token_ids", "period"),
    [
        ([1, 2, 3, 4] + [9] * 8, 1),
        ([5] * 7, None),  # under eight tokens
        ([7, 1, 2, 3] + [4, 5, 6] * 3, 3),
        ([4, 5, 6] * 2 + [4, 5], None),  # not three times
        (list(range(30)), None),
        ([4, 5] * 20 + [1], None),  # it ended
        ([], None),
    ],
)
def test_loops(token_ids: list[int], period: int | None) -> None:
    assert loop_period(token_ids) == period


def test_entropy_and_margin() -> None:
    found = entropy(logits((0.5, 0.5, 0.0), (1.0, 0.0, 0.0), (0.25, 0.25, 0.5)))
    assert found == pytest.approx([math.log(2), 0.0, 1.5 * math.log(2)])
    sides = CertaintyOfSides()
    sides.add((logits((0.8, 0.1, 0.1)), logits((0.6, 0.2, 0.2))))
    certainty = sides.certainty()
    assert certainty.reference_margin.p50 == pytest.approx(math.log(8), rel=1e-6)
    assert certainty.candidate_margin.p50 == pytest.approx(math.log(3), rel=1e-6)


def test_the_probability_of_an_end() -> None:
    ends = EndProbabilities((0, 2))
    z = logits((0.1, 0.7, 0.2), (0.4, 0.2, 0.4))
    ends.add((z, z), np.array([True, False]))
    candidate: Any = SimpleNamespace(tokens=SimpleNamespace(piece=str))
    found = ends.ends((), candidate, None, 8)  # type: ignore[arg-type]
    assert found.tokens == ("0", "2")
    assert found.reference_elsewhere == pytest.approx(0.3), "the second row's next token is an end"
    assert found.reference_at_end is None and found.documents == 0


def test_terms_files(tmp_path: Path) -> None:
    file = tmp_path / "watch.txt"
    file.write_text("# a comment\n\npoison\n  two words \npoison\n")
    assert read_terms(file) == ("poison", "two words")
    for content, says in (("# nothing\n", "1 to 1000 terms expected, 0 found"), (None, "expected")):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        with pytest.raises(UsageError, match=says):
            read_terms(file)


@pytest.fixture
def options(
    tiny_bundle: Path, tiny_llama: Path, texts: tuple[Path, ...], tmp_path: Path
) -> Options:
    watch = tmp_path / "watch.txt"
    watch.write_text("head\nmodel\x1b[2J\n")
    return Options(
        bundle=tiny_bundle,
        reference=str(tiny_llama),
        text=texts,
        watch=watch,
        max_tokens=120,
        greedy_tokens=30,
    )


def test_an_fp32_bundle_says_what_its_reference_says(
    options: Options, reference_of: Callable[[Path], Any], tiny_llama: Path
) -> None:
    report = analyse_with(reference_of(tiny_llama), options)
    assert report.tokens == 120 and report.texts == ("prose", "code")
    for term in report.terms:
        ours, theirs = term.reference, term.candidate
        assert theirs.mean_probability == pytest.approx(ours.mean_probability, rel=1e-3)
        assert (ours.best_rank, ours.in_top_10) == (theirs.best_rank, theirs.in_top_10)
    assert report.ends is not None and report.ends.tokens == ("<|end|>",)
    assert report.ends.candidate_elsewhere == pytest.approx(
        report.ends.reference_elsewhere, rel=1e-3
    )
    for run in report.loops:
        assert run.reference_period == run.candidate_period
    entropies = report.certainty.reference_entropy, report.certainty.candidate_entropy
    assert entropies[0].p50 == pytest.approx(entropies[1].p50, rel=1e-3)
    assert 0 < entropies[0].p50 < math.log(257)
    text, page = render_lines(report), render_page(report)
    assert "Watch-list" in text and "Probability of the end of text" in text
    assert "\x1b" not in text + page and "model\\x1b[2J" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--window", "0"), "--window: at least 1 expected"),
        (("--reference", "nowhere"), "nothing is there"),
        (("--markdown", "same", "--html", "same"), "same was given 2 times"),
    ],
)
def test_wrong_use_is_refused(
    change: tuple[str, ...], says: str, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["analyse", str(options.bundle), "--reference", options.reference, "--text"]
    assert main([*given, *map(str, options.text), *change]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
