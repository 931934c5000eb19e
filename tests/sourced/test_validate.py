"""Validation of encoder-decoder bundles: pairs, both sides, gates, and faults they must find."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import CheckpointError, HeadportError, ParityError, UsageError
from headport.validate.candidate import Candidate
from headport.validate.command import Options, validate_with
from headport.validate.given_source import GivenSource
from headport.validate.local_reference import LocalReference
from headport.validate.reference import Reference
from headport.validate.report import Report
from tests.sourced.models import BINS, FRAMES, START, load, sources
from tests.sourced.test_export import drop_bias, edit, swap
from tests.validate.sabotage import sabotage

PAIRS = [
    ("The head is the last matrix.", "Der Kopf ist die letzte."),
    ("It gives one logit per token.", "Ein Wert je Zeichen."),
    ("Rounding moves a few.", "Runden verschiebt manche."),
    ("A source is read once.", "Die Quelle liest man einmal."),
]


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], LocalReference]:
    return cache(lambda name: LocalReference(Reference(str(checkpoint(name)), "--sourced")))


def written(file: Path, lines: Any) -> Path:
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    return written(folder / "pairs.jsonl", [{"source": s, "target": t} for s, t in PAIRS])


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    lines = []
    for n, features in enumerate(sources("whisper", 2)):
        np.save(folder / f"{n}.npy", features)
        lines.append({"features": f"{n}.npy", "target": PAIRS[n][1]})
    return written(folder / "clips.jsonl", lines)


def options(bundle: Path, model: Path, text: Path, **changes: Any) -> Options:
    small = {"greedy_tokens": 6, "noise_floor_tokens": 30, "attribution_tokens": 60}
    return Options(bundle=bundle, reference=str(model), text=(text,), **(small | changes))


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_good_bundle_passes_and_is_split_into_parts(
    name, bundle, checkpoint, reference, pairs, clips
):
    text = clips if name == "whisper" else pairs
    report = validate_with(reference(name), options(bundle(name), checkpoint(name), text))
    assert report.verdict == "passed"
    assert report.documents == (2 if name == "whisper" else 4)
    assert report.attribution is not None and report.noise_floor is not None
    # A scale that is applied twice, or states from before it, would show in the head's part.
    assert max(part.kl_mean for part in report.attribution.parts) < 1e-9
    assert report.attribution.parts[0].max_abs_logit_error < 1e-4
    runs = report.slices[0].greedy
    assert {(run.prompt_tokens, run.new_tokens) for run in runs} == {(1, 6)}
    assert all(run.first_divergence is None or run.near_tie for run in runs)
    assert "each behind its own source" in report.protocol.description
    assert "start" in report.protocol.counting and "starts the decoder" in (
        report.protocol.special_tokens
    )


def test_a_lowered_bundle_passes_in_batches(lowered, checkpoint, reference, pairs):
    given = options(lowered("t5"), checkpoint("t5"), pairs, batch_size=3, attribution_tokens=0)
    report = validate_with(reference("t5"), given)
    assert report.verdict == "passed" and report.candidate.target == "ort-cpu"


def test_every_token_of_a_target_is_scored_behind_the_start_token(bundle, reference, pairs):
    from headport.runtime import Generator

    candidate = Candidate(Bundle.open(bundle("marian")), 1)
    lm = reference("marian")
    model, tokenizer = lm.inner.model.inner, lm.inner.tokenizer
    source, target = PAIRS[0]
    ids = tokenizer(source)["input_ids"]
    fed = [START, *tokenizer(target)["input_ids"]]
    import torch

    wanted = model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([fed])).logits[0]
    lm.ask_score(np.array(fed), source=GivenSource(token_ids=tuple(ids)))
    [block] = lm.read_score(len(fed))
    np.testing.assert_allclose(block.logits, wanted.detach().numpy(), atol=1e-5)
    # As the runtime itself gives them.
    [states] = candidate.hidden_states([np.array(fed)], [GivenSource(token_ids=tuple(ids))])
    with Generator(bundle("marian"), threads=1) as generator:
        found = generator.logits(fed, source=source)
    np.testing.assert_allclose(candidate.logits(states), found, atol=1e-5)
    from headport.validate.comparison import prepare
    from headport.validate.documents import read_texts

    [material] = prepare(read_texts([pairs]), candidate, 0, (), candidate.sources)
    assert material.documents[0].token_ids.tolist() == fed
    assert [d.tokens_scored for d in material.documents] == [
        len(tokenizer(t)["input_ids"]) for _, t in PAIRS
    ]
    assert material.documents[0].bytes_scored == len(target.encode())


def test_greedy_runs_are_those_of_transformers(reference):
    from tests.sourced.models import reply_of_transformers, until_end

    lm, given = reference("marian"), sources("marian", 3)
    told = [GivenSource(token_ids=tuple(ids)) for ids in given]
    lm.ask_greedy(np.full((3, 1), START), 8, told)
    found = [until_end(list(row)) for row in lm.read_greedy().token_ids]
    model = lm.inner.model.inner
    replies = [reply_of_transformers(model, each, max_new_tokens=9)[0] for each in given]
    assert found == [reply[:8] for reply in replies]  # it ends a ninth token by force


# --- sabotage: each of these must fail the gates -------------------------------------------------


def failed(report: Report) -> set[str]:
    return {gate.metric for gate in report.gates if gate.verdict == "failed"}


NAME = "cross_key_values"


def test_exchanged_cross_keys_fail(bundle, checkpoint, reference, pairs, tmp_path):
    def fault(folder: Path) -> None:
        edit(folder, "encoder.onnx", swap(f"{NAME}.0.key", f"{NAME}.1.key"))

    broken = sabotage(bundle("t5"), tmp_path / "broken", fault)
    report = validate_with(reference("t5"), options(broken, checkpoint("t5"), pairs))
    assert report.verdict == "failed" and "kl_mean" in failed(report)
    assert report.attribution is not None and report.attribution.largest == "backbone"


def test_a_lost_final_logits_bias_exits_1(bundle, checkpoint, pairs, tmp_path, capsys):
    def fault(folder: Path) -> None:
        edit(folder, "head.lm.onnx", drop_bias)

    broken = sabotage(bundle("marian"), tmp_path / "broken", fault)
    code = main(
        [
            *("validate", str(broken), "--reference", str(checkpoint("marian"))),
            *("--text", str(pairs), "--greedy-tokens", "0", "--noise-floor-tokens", "0"),
            *("--json", str(tmp_path / "report.json")),
        ]
    )
    assert code == 1, capsys.readouterr().err
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert report["verdict"] == "failed" and report["attribution"]["largest"] == "head"


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_exchanged_sources_fail(
    name, bundle, checkpoint, reference, pairs, clips, monkeypatch: pytest.MonkeyPatch
):
    faithful = Candidate.hidden_states
    before: list[GivenSource] = []

    def late(self: Candidate, windows: Any, given: Any = ()) -> Any:
        before.extend(given)
        return faithful(self, windows, [before[max(0, len(before) - 2)]])

    monkeypatch.setattr(Candidate, "hidden_states", late)
    text = clips if name == "whisper" else pairs
    report = validate_with(reference(name), options(bundle(name), checkpoint(name), text))
    assert report.verdict == "failed" and "kl_mean" in failed(report)


# --- what is refused -----------------------------------------------------------------------------

LONG = "word " * 60
WRONG: list[tuple[str, dict[str, Any], list[dict[str, str]], str]] = [
    ("t5", {"bisect": True}, [], "--bisect: .* is of an encoder-decoder model"),
    ("t5", {"overlap": 3}, [], "--overlap: .* is of an encoder-decoder model"),
    ("t5", {}, [{"text": "The head is the last."}], "record 0 is another"),
    ("t5", {}, [{"features": "0.npy", "target": "a"}], r'"source": …, "target"'),
    ("whisper", {}, [{"source": "a b", "target": "a"}], r'"features": …, "target"'),
    ("bart", {}, [{"source": LONG, "target": "a"}], "pair 0: source 0 has .* tokens, the encoder"),
    ("bart", {}, [{"source": "a", "target": LONG}], "pair 0: its target takes .* the window holds"),
    ("t5", {}, [{"source": "a", "target": " "}], "line 1: a target was expected, an empty one"),
    ("t5", {}, [{"source": "a"}], "source and target, or messages alone were"),
    ("whisper", {}, [{"features": "none.npy", "target": "a"}], "none.npy: a .npy file beside it"),
    ("whisper", {}, [{"features": "odd.npy", "target": "a"}], r"pair 0: source 0 is \[2, 3\]"),
    ("whisper", {}, [{"features": "text.npy", "target": "a"}], "pair 0: "),
]


@pytest.mark.parametrize(("name", "changes", "lines", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_use_is_named(
    name, changes, lines, message, bundle, checkpoint, reference, pairs, tmp_path
):
    np.save(tmp_path / "0.npy", np.zeros((BINS, FRAMES), np.float32))
    np.save(tmp_path / "odd.npy", np.zeros((2, 3), np.float32))
    (tmp_path / "text.npy").write_text("no array")
    text = written(tmp_path / "given.jsonl", lines) if lines else pairs
    with pytest.raises(HeadportError, match=message) as caught:
        validate_with(reference(name), options(bundle(name), checkpoint(name), text, **changes))
    assert caught.value.exit_code == 2


def test_each_kind_of_bundle_wants_its_kind_of_text_and_reference(
    bundle, checkpoint, reference, pairs, tiny_bundle, tiny_llama, tmp_path
):
    causal = options(tiny_bundle, checkpoint("t5"), pairs)
    with pytest.raises(UsageError, match="pairs of source and target are for encoder-decoder"):
        validate_with(reference("t5"), causal)
    plain = tmp_path / "plain.txt"
    plain.write_text("The head is the last matrix of a model.")
    with pytest.raises(UsageError, match=r"a \.jsonl file of lines .* plain text found"):
        validate_with(reference("t5"), options(bundle("t5"), checkpoint("t5"), plain))
    with pytest.raises(UsageError, match="the reference t5 is an encoder-decoder model"):
        validate_with(reference("t5"), options(tiny_bundle, checkpoint("t5"), plain))
    with pytest.raises(CheckpointError, match="an encoder-decoder model was expected"):
        Reference(str(tiny_llama), "--sourced")


def test_another_tokenizer_or_start_token_ends_the_run(
    bundle, checkpoint, reference, pairs, monkeypatch: pytest.MonkeyPatch
):
    given = options(bundle("t5"), checkpoint("t5"), pairs)
    lm = reference("t5")
    with monkeypatch.context() as patch:
        patch.setattr(lm.inner.model, "start_token", 5)
        ready = msgspec.structs.replace(lm.inner.ready, start_token=5)
        patch.setattr(lm.inner, "ready", ready)
        with pytest.raises(ParityError, match="starts with token 2, the reference's with 5"):
            validate_with(lm, given)
    encode = lm.encode
    first = PAIRS[0][0]

    def other(texts: Any) -> Any:
        return tuple(
            (*ids[:-1], 7) if text == first else ids
            for text, ids in zip(texts, encode(texts), strict=True)
        )

    monkeypatch.setattr(lm, "encode", other)
    with pytest.raises(ParityError, match=r"pair 0: .* of the source"):
        validate_with(lm, given)


def test_features_count_in_what_a_text_is_known_by(clips):
    from headport.validate.documents import read_texts

    [before] = read_texts([clips])
    file = clips.parent / "1.npy"
    kept = file.read_bytes()
    np.save(file, np.zeros((BINS, FRAMES), np.float32))
    [after] = read_texts([clips])
    file.write_bytes(kept)
    assert before.sha256 != after.sha256 and before.content == after.content


def test_a_quantised_head_is_judged_by_its_own_row(bundle, checkpoint, reference, pairs, tmp_path):
    from headport.quantize.command import Options as Quantisation
    from headport.quantize.command import quantize

    made = quantize(Quantisation(bundle=bundle("bart"), output=tmp_path / "q", head="int8"))
    given = options(
        made.path, checkpoint("bart"), pairs, unquantised=bundle("bart"), sampler=True, batch_size=3
    )
    report = validate_with(reference("bart"), given)
    assert report.gates_source == "defaults of int8"
    assert report.attribution is not None and len(report.attribution.parts) == 4
    assert report.attribution.largest == "head"
    assert report.sampler is not None and report.sampler.verdict == "passed"


def test_the_wrapped_model_answers_to_the_source_read_last(checkpoint):
    import torch

    from headport.validate.sourced_model import SourcedModel

    wrapped, model = SourcedModel(load(checkpoint("t5"))), load(checkpoint("t5"))
    ids = torch.tensor([[START, 4, 9]])
    for source in ([5, 8, 1], [7, 3]):
        wrapped.read(GivenSource(token_ids=tuple(source)))
        with torch.no_grad():
            first = wrapped(input_ids=ids[:, :2], use_cache=True)
            rest = wrapped(input_ids=ids[:, 2:], use_cache=True, cache=first.cache)
            wanted = model(input_ids=torch.tensor([source]), decoder_input_ids=ids).logits
        found = torch.cat([first.logits, rest.logits], dim=1)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(CheckpointError, match="reads a text as its source"):
        wrapped.read(GivenSource(features="a.npy"))
