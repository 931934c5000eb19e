"""Beam search against transformers: the same model, the same replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import NonFiniteError, RequestError
from headport.runner import open_runner
from headport.runtime.beams import BeamSearch
from headport.runtime.generation_config import Defaults
from headport.runtime.parameters import resolve
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.chooser import make_chooser
from headport.runtime.text import TextStream, Tokens
from headport.runtime.vocabulary import IdMap
from tests.runtime.beam_reference import beams_of_transformers
from tests.runtime.conftest import TableRunner, manifest

END = 256


def search(bundle: Bundle, runner: Any, prompt: list[int], limit: int, **options: Any) -> list[Row]:
    ids, head = IdMap.from_bundle(bundle), bundle.manifest.heads["lm"]
    request = resolve({"max_new_tokens": limit, **options}, Defaults(), 1)  # type: ignore[typeddict-item]
    chooser = make_chooser(runner, "lm", head, ids, Stats(), exact=False)

    def new_row() -> Row:
        text = TextStream(Tokens(bundle), request.stop)
        return Row(0, prompt, request.parameters(limit), None, text, watched=bool(request.stop))

    return BeamSearch(runner, chooser, new_row, ids.ids, 3).run()


SETTINGS = [
    {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
    for beams in (2, 4)
    for penalty in (-1.0, 0.0, 1.0, 2.0)
    for early in (False, True, "never")
]
PROMPTS = [[5, 9, 200, 31], [77, 78], [12, 13, 14, 15, 16, 17, 18], [250]]
RULES = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},
    "ngrams": {"no_repeat_ngram_size": 2},
    "length": {"min_new_tokens": 4},
    "words": {"bad_words": [[30], [5, 9]], "suppress_tokens": [8, 40]},
}


@pytest.fixture(scope="module")
def portable(tiny_bundle: Path) -> tuple[Bundle, Any]:
    bundle = Bundle.open(tiny_bundle)
    return bundle, open_runner(bundle)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama).eval()


def agree(bundle: Bundle, runner: Any, model: Any, prompt: list[int], **options: Any) -> None:
    # Many ends, so that replies of several lengths compete.
    ends, limit, n = [3, 50, 90, 120, 200], 7, options["num_beams"]
    rows = search(bundle, runner, prompt, limit, eos_token_id=ends, n=n, **options)
    wanted, scores = beams_of_transformers(model, prompt, limit, ends, **options)
    assert [row.token_ids for row in rows] == wanted
    assert [row.score for row in rows] == pytest.approx(scores, abs=1e-4)
    assert [row.sample for row in rows] == list(range(n))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_replies_and_scores_are_those_of_transformers(settings, portable, model):
    prompt = PROMPTS[SETTINGS.index(settings) % len(PROMPTS)]
    agree(*portable, model, prompt, **settings)


@pytest.mark.parametrize("settings", SETTINGS[::5], ids=str)
def test_caches_in_place_are_reordered(settings, tiny_lowered, model):
    bundle = Bundle.open(tiny_lowered)
    runner = open_runner(bundle)
    for prompt in PROMPTS[1:2]:
        agree(bundle, runner, model, prompt, **settings)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_processors_act_on_log_probabilities(rules, portable, model):
    agree(*portable, model, PROMPTS[0], num_beams=3, **rules)


def test_allowed_tokens_hold_for_every_beam(portable, model):
    def allowed(past: Any) -> list[int]:
        return [7, 50, 60, int(past[-1]) % 250 + 1]

    ours = {"allowed": lambda c: allowed([*c.prompt_token_ids, *c.token_ids])}
    rows = search(*portable, PROMPTS[0], 6, eos_token_id=[50], num_beams=3, n=3, **ours)
    wanted, scores = beams_of_transformers(
        model,
        PROMPTS[0],
        6,
        [50],
        num_beams=3,
        prefix_allowed_tokens_fn=lambda _, past: allowed(past),
    )
    assert [row.token_ids for row in rows] == wanted
    assert [row.score for row in rows] == pytest.approx(scores, abs=1e-4)


def test_a_stop_text_completes_a_beam(bundle_folder, table):
    bundle = Bundle(bundle_folder, manifest())
    options: dict[str, Any] = {"eos_token_id": (), "num_beams": 2, "n": 2}
    free = search(bundle, TableRunner(table), [40], 6, **options)
    text = free[0].text.text
    stopped = search(bundle, TableRunner(table), [40], 6, stop=text[1:3], **options)
    assert stopped[0].finish_reason == "stop" or len(stopped[0].token_ids) == 6
    assert any(row.finish_reason == "stop" for row in stopped)
    assert all(text[1:3] not in row.text.text for row in stopped)


def test_rows_that_are_not_finite_are_refused(bundle_folder, table):
    broken = table.copy()
    broken[:, 3] = np.nan
    with pytest.raises(NonFiniteError, match="row 0, step 0"):
        search(Bundle(bundle_folder, manifest()), TableRunner(broken), [1], 4, num_beams=2)


def test_a_request_that_bans_everything_says_so(bundle_folder, table):
    bundle = Bundle(bundle_folder, manifest())
    with pytest.raises(RequestError, match="ban every token"):
        search(
            bundle, TableRunner(table), [1], 4, num_beams=2, suppress_tokens=list(range(END + 1))
        )


def test_a_prompt_is_run_in_pieces_of_one_step_each(portable, model):
    bundle, runner = portable
    ids, head = IdMap.from_bundle(bundle), bundle.manifest.heads["lm"]
    request = resolve({"max_new_tokens": 2, "num_beams": 2}, Defaults(), 1)
    chooser = make_chooser(runner, "lm", head, ids, Stats(), exact=False)

    def new_row() -> Row:
        return Row(0, PROMPTS[2], request.parameters(2), None, TextStream(Tokens(bundle)), False)

    search, before = BeamSearch(runner, chooser, new_row, ids.ids, 3), runner.runs
    for _ in range(len(PROMPTS[2]) // 3 + 2):  # 7 tokens, then one step for the second new token
        assert not search.done
        search.step()
    assert search.done and runner.runs - before == 4
