"""Every kind of head through the runtime, against transformers and the trained modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.errors import BundleError, PromptError, RequestError
from headport.runtime import Heads
from headport.runtime.states import States, last_tokens
from tests.head_models import CUTOFFS, VOCAB, head_modules

TEXTS = [[5, 9, 200, 13], [7], [40, 41, 42, 43, 44, 45, 46, 250, 3]]


@pytest.fixture(scope="module")
def heads(headed_bundle: Path) -> Heads:
    return Heads(headed_bundle, threads=1)


@pytest.fixture(scope="module")
def states(heads: Heads) -> States:
    return heads.encode(TEXTS)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> list[Any]:
    """(hidden states, logits) of each text alone, as transformers gives them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    found = []
    with torch.no_grad():
        for text in TEXTS:
            out = model(torch.tensor([text]), output_hidden_states=True)
            found.append((out.hidden_states[-1][0], out.logits[0]))
    return found


def close(found: np.ndarray, expected: torch.Tensor) -> None:
    wanted = expected.detach().numpy()
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()


def test_one_run_of_the_backbone_gives_value_and_logits(headed_bundle, reference):
    heads = Heads(headed_bundle, threads=1)
    states = heads.encode(TEXTS)
    values, logits = heads.values(states), heads.logits(states, "lm")
    assert heads.stats.backbone_runs == 1
    module = head_modules()["reward"]
    for value, each, (hidden, expected) in zip(values, logits, reference, strict=True):
        close(value, module(hidden))
        close(each, expected)


def test_a_batch_of_three_tasks_is_three_single_runs(heads, states, reference):
    module, wanted = head_modules()["judge"], ["topic", "toxic", "mood"]
    together = heads.tasks(states, wanted)
    for text, task, found, (hidden, _) in zip(TEXTS, wanted, together, reference, strict=True):
        [alone] = heads.tasks(heads.encode([text]), task)
        assert found.task == alone.task == task and found.labels == alone.labels
        assert np.allclose(found.scores, alone.scores, atol=1e-6)
        close(found.scores, module.scores(hidden[-1], task))
        assert found.best == found.labels[int(found.scores.argmax())]
    assert [len(found.labels) for found in together] == [3, 1, 2]


def test_a_second_vocabulary_head(heads, states, reference):
    module = head_modules()["later"]
    for found, (hidden, _) in zip(heads.logits(states, "later"), reference, strict=True):
        close(found, module(hidden))


@pytest.mark.parametrize("head", ["frequent", "tree"])
def test_log_probs_and_predictions_of_clusters(heads, states, reference, head):
    module = head_modules()[head]
    found = heads.log_probs(states, head)
    for log_probs, ids, (hidden, _) in zip(
        found, heads.predict(states, head), reference, strict=True
    ):
        close(log_probs, module.log_prob(hidden))
        assert np.abs(np.exp(log_probs).sum(axis=1) - 1).max() < 1e-6
        assert (ids == module.predict(hidden).numpy()).all()


@pytest.mark.parametrize("head", ["lm", "frequent", "tree"])
def test_top_is_the_sorted_whole(heads, states, head):
    whole = heads.log_probs(states, head, positions="last")
    for (ids, log_probs), each in zip(
        heads.top(states, 7, head, positions="last"), whole, strict=True
    ):
        order = np.argsort(-each, axis=1, kind="stable")[:, :7]
        assert (ids == order).all()
        assert np.allclose(log_probs, np.take_along_axis(each, order, axis=1), atol=1e-6)


def test_clusters_are_read_when_they_are_needed(headed_bundle):
    heads = Heads(headed_bundle, threads=1)
    states = heads.encode(TEXTS)
    expected = head_modules()["frequent"].predict(torch.from_numpy(np.concatenate(states.hidden)))
    heads.predict(states, "frequent")
    rows, read = heads.stats.rows["frequent"], heads.stats.cluster_rows["frequent"]
    assert rows == sum(map(len, TEXTS))
    for cluster in range(2):
        assert read.get(cluster, 0) < rows
    in_tails = int((expected >= CUTOFFS[0]).sum())
    assert in_tails <= sum(read.values())
    heads.log_probs(states, "frequent")  # all of it is asked for
    assert sum(heads.stats.cluster_rows["frequent"].values()) == sum(read.values()) + 2 * rows


def test_positions(heads, states):
    every = heads.logits(states, "lm")
    last = heads.logits(states, "lm", positions="last")
    some = heads.logits(states, "lm", positions=[[0, -1], [], [8]])
    assert [len(each) for each in some] == [2, 0, 1]
    assert np.allclose(last[2], every[2][-1:], atol=1e-6)
    assert np.allclose(some[0], every[0][[0, -1]], atol=1e-6)
    assert states.where(42) == [[], [], [2]]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda h, s: h.values(s, "nothing"), "no head 'nothing' in the bundle (heads: lm, later"),
        (lambda h, s: h.values(s, "lm"), "head lm gives no values; heads that do: reward"),
        (lambda h, s: h.logits(s), "head: name one; heads that give logits: lm, later"),
        (lambda h, s: h.logits(s, "lm", "first"), "'all', 'last' or a list per text"),
        (lambda h, s: h.logits(s, "lm", [[0]]), "one list per text was expected: 3, 1 given"),
        (lambda h, s: h.logits(s, "lm", [[], [1], []]), "text 1 has 1 tokens, [1] were asked for"),
        (lambda h, s: h.tasks(s), "name one per text; head judge has mood, topic, toxic"),
        (lambda h, s: h.tasks(s, "colour"), "has no task 'colour'; it has mood, topic, toxic"),
        (lambda h, s: h.tasks(s, ["mood"]), "one per text was expected: 3, 1 given"),
        (lambda h, s: h.top(s, 0, "lm"), f"count must be from 1 to {VOCAB}, 0 was given"),
        (lambda h, s: h.top(s, 258, "tree"), f"count must be from 1 to {VOCAB}, 258 was given"),
    ],
)
def test_what_cannot_be_asked_is_refused(heads, states, ask, message):
    with pytest.raises(RequestError) as caught:
        ask(heads, states)
    assert message in str(caught.value)


def test_texts_that_do_not_fit(heads):
    with pytest.raises(PromptError, match=r"texts \[1\] have \[65\] tokens, the context holds 64"):
        heads.encode([[1], [1] * 65])
    with pytest.raises(PromptError, match="prompt 0 holds 257"):
        heads.encode([[257]])


def test_the_last_token_that_is_not_padding():
    hidden = tuple(np.zeros((4, 2), np.float32) for _ in range(2))
    padded = States(((5, 0, 7, 0), (0, 0, 0, 8)), hidden, rectangular=True)
    assert last_tokens(padded, 0) == [[2], [3]]
    with pytest.raises(RequestError, match="names no padding token"):
        last_tokens(padded, None)
    ragged = States(((5, 0, 7, 0), (0, 0, 0, 8)), hidden)
    assert last_tokens(ragged, None) == [[3], [3]]
    with pytest.raises(RequestError, match="text 0 is padding alone"):
        last_tokens(States(((3, 3),), hidden[:1]), 3)


def test_a_damaged_order_of_a_tree_is_refused(headed_bundle, tmp_path):
    import shutil

    copy = tmp_path / "bundle"
    shutil.copytree(headed_bundle, copy)
    order = np.load(copy / "tree.order.npy")
    order[0] = order[1]
    np.save(copy / "tree.order.npy", order)
    with pytest.raises(BundleError, match=r"tree\.order\.npy: changed"):
        Heads(copy)
    heads = Heads(copy, verify=False)
    with pytest.raises(BundleError, match="does not name each token of tree once"):
        heads.predict(heads.encode([[1]]), "tree")


def test_the_command_says_what_heads_answer(headed_bundle, capsys, tmp_path):
    import json

    from headport.cli import main

    out = tmp_path / "out.json"
    asked = ["heads", str(headed_bundle), "-t", "one text", "another", "--json", str(out)]
    assert main([*asked, "--task", "mood", "topic", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "'one text'  judge.mood: " in shown and "'another'  judge.topic: " in shown
    found = json.loads(out.read_text())
    assert len(found) == 2 * 6
    for record in found:
        assert ("values" in record) == (record["head"] == "reward")
        if record["head"] in ("lm", "later", "frequent", "tree"):
            assert len(record["token_ids"][0]) == 2
    assert main([*asked, "--head", "nothing"]) == 2
    error = capsys.readouterr().err
    assert "no head 'nothing' in the bundle" in error and error.count("\n") == 1
    assert main([*asked, "--head", "judge", "--task", "colour", "mood"]) == 2
    assert "has no task 'colour'" in capsys.readouterr().err
