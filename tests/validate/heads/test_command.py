"""Every kind of head against PyTorch: what passes, what each fault fails, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import CheckpointError, ParityError, UsageError
from headport.manifest import encode_manifest
from headport.validate.heads.command import (
    HeadsReport,
    Options,
    validate_heads,
    validate_heads_with,
)
from headport.validate.heads.figures import HeadSums
from headport.validate.heads.reference import HeadsReference
from tests.validate.heads.local import Local
from tests.validate.sabotage import (
    read_bytes,
    read_manifest,
    sabotage,
    write_bytes,
    write_manifest,
)

TEXTS = [{"text": "The head is the last matrix."}, {"text": "It has a row per token."}]


def specs(bundle: Path) -> tuple[str, ...]:
    """The heads of `headed_bundle` as export was given them."""
    names = Bundle.open(bundle).manifest
    own = [n for n in (*names.heads, *names.task_heads) if n != "lm"]
    return tuple(f"{name}={bundle.parent / name}.safetensors" for name in own)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, TEXTS)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def reference(tiny_llama: Path, headed_bundle: Path) -> Local:
    flags = [f"--head={spec}" for spec in specs(headed_bundle)]
    return Local(HeadsReference(str(tiny_llama), *flags))


def compared(reference: Local, bundle: Path, texts: Path, **more: Any) -> HeadsReport:
    return validate_heads_with(
        reference, Options(bundle=bundle, reference="", text=(texts,), **more)
    )


def test_all_kinds_pass_on_a_good_bundle(reference, headed_bundle, texts):
    report = compared(reference, headed_bundle, texts)
    assert report and report.documents == 2 and report.notes == ()
    kinds = {found.head: found.kind for found in report.heads}
    assert kinds == {
        "reward": "value",
        "judge": "tasks",
        "later": "vocabulary",
        "frequent": "adaptive",
        "tree": "tree",
    }
    for found in report.heads:
        assert 0 < found.relative_error <= found.limit == 2e-4
        assert found.same_best in (None, 1.0)
    answers = {found.head: found.answers for found in report.heads}
    assert answers["judge"] == 2 * 3  # per text and task, at its last token
    assert answers["reward"] == answers["later"] == report.tokens


@pytest.mark.parametrize(
    ("weight", "fails"),
    [
        ("reward.weight", "reward"),
        ("judge.topic.weight", "judge"),
        ("later.weight", "later"),
        ("frequent.tail1.weight", "frequent"),
        ("tree.members.weight", "tree"),
    ],
)
def test_a_changed_matrix_fails_its_head_alone(
    weight, fails, reference, headed_bundle, texts, tmp_path
):
    def fault(folder: Path) -> None:
        [tensor] = [t for t in read_manifest(folder).tensors if t.name == weight]
        data = np.frombuffer(read_bytes(folder, tensor), np.float32)
        write_bytes(folder, tensor, np.roll(data, tensor.shape[-1] // 2).tobytes())

    broken = sabotage(headed_bundle, tmp_path / "broken", fault)
    report = compared(reference, broken, texts)
    assert not report
    assert [found.head for found in report.heads if found.verdict == "failed"] == [fails]


def test_the_verb_runs_a_process_and_exits_by_the_limit(
    tiny_llama, headed_bundle, texts, tmp_path, capsys
):
    file = tmp_path / "report.json"
    code = main(
        [
            *("validate-heads", str(headed_bundle), "--reference", str(tiny_llama)),
            *("--text", str(texts), "--head", *specs(headed_bundle)),
            *("--limit", "0", "--json", str(file)),
        ]
    )
    captured = capsys.readouterr()
    assert code == 1, captured.err
    assert captured.out.startswith("FAILED: bundle on 2 texts")
    assert "failed  judge (tasks, fp32)" in captured.out
    document = json.loads(file.read_text())
    assert {found["limit"] for found in document["heads"]} == {0}


def test_a_quantised_head_is_held_to_its_own_limit(reference, headed_bundle, texts, tmp_path):
    from headport.quantize.command import Options as Quantisation
    from headport.quantize.command import quantize

    made = quantize(Quantisation(bundle=headed_bundle, output=tmp_path / "q", head="int8"))
    report = compared(reference, made.path, texts)
    assert report
    limits = {found.head: (found.recipe, found.limit) for found in report.heads}
    assert limits["frequent"] == ("int8", 5e-2) and limits["reward"] == ("fp32", 2e-4)
    assert all(f.relative_error > 2e-4 for f in report.heads if f.recipe == "int8")


def test_wrong_use_is_named(reference, headed_bundle, tiny_bundle, tiny_llama, texts, tmp_path):
    with pytest.raises(UsageError, match="it has no head but lm"):
        compared(reference, tiny_bundle, texts)
    with pytest.raises(UsageError, match=r"--head lost: .* has no such head, it has later, reward"):
        compared(reference, headed_bundle, texts, head=("lost=lost.safetensors",))
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": "word " * 400}))
    with pytest.raises(UsageError, match=r"document 0: \d+ tokens, the context holds"):
        compared(reference, headed_bundle, long)
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    with pytest.raises(UsageError, match="heads are compared on texts"):
        compared(reference, headed_bundle, chat)
    with pytest.raises(UsageError, match="NAME=FILE or NAME=auto was expected"):
        HeadsReference(str(tiny_llama), "--head=reward")
    with pytest.raises(CheckpointError, match="nothing is there"):
        HeadsReference(str(tiny_llama), f"--head=reward={tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ()}, "--text: at least one file expected"),
        ({"limit": -1.0}, "--limit: a share of 0 or more was expected, -1 given"),
        ({"limit": float("nan")}, "--limit: a share of 0 or more"),
        ({"text": (Path("none.txt"),)}, "none.txt: a text file was expected"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(
    changes, message, headed_bundle, tiny_llama, texts
):
    given = {"text": (texts,), "bundle": headed_bundle, "reference": str(tiny_llama)}
    with pytest.raises(UsageError, match=message):
        validate_heads(Options(**(given | changes)))


def test_a_merged_adapter_is_no_bundle_of_the_model_without_it(
    reference, headed_bundle, texts, tmp_path
):
    def fault(folder: Path) -> None:
        manifest = read_manifest(folder)
        [first, *more] = manifest.provenance.stages
        adapter = {"name": "tuned", "checkpoint_sha256": manifest.provenance.sha256}
        first = msgspec.structs.replace(first, report=first.report | {"adapter": adapter})
        changed = msgspec.structs.replace(manifest.provenance, stages=(first, *more))
        write_manifest(folder, msgspec.structs.replace(manifest, provenance=changed))

    tuned = sabotage(headed_bundle, tmp_path / "tuned", fault)
    with pytest.raises(UsageError, match=r"with the adapter tuned, .* merge_and_unload"):
        compared(reference, tuned, texts)


def test_exchanged_names_of_scores_end_the_run(reference, headed_bundle, texts, tmp_path):
    def fault(folder: Path) -> None:
        manifest = read_manifest(folder)
        judge = manifest.task_heads["judge"]
        topic = msgspec.structs.replace(
            judge.tasks["topic"], labels=judge.tasks["topic"].labels[::-1]
        )
        judge = msgspec.structs.replace(judge, tasks={**judge.tasks, "topic": topic})
        heads = {**manifest.task_heads, "judge": judge}
        changed = msgspec.structs.replace(manifest, task_heads=heads)
        (folder / "manifest.json").write_bytes(encode_manifest(changed))

    broken = sabotage(headed_bundle, tmp_path / "broken", fault)
    with pytest.raises(ParityError, match="head judge names its scores"):
        compared(reference, broken, texts)


def test_another_tokenizer_ends_the_run(reference, headed_bundle, texts, monkeypatch):
    monkeypatch.setattr(reference, "encode", lambda texts: [(1, 2)] * len(texts))
    with pytest.raises(ParityError, match="differ at token 0"):
        compared(reference, headed_bundle, texts)


def test_nothing_compared_is_no_pass_and_a_missing_answer_is_a_full_miss():
    sums = HeadSums()
    assert sums.figures("a", "value", "fp32", None).verdict == "undecided"
    sums.add({}, {"values": np.ones(3, np.float32)})
    assert sums.figures("a", "value", "fp32", None).verdict == "failed"
    for found, wanted in (
        ({"t": np.ones((1, 2))}, {"t": np.ones((1, 3))}),  # a label less
        ({"t": np.ones((1, 2)), "more": np.ones((1, 2))}, {"t": np.ones((1, 2))}),
        ({"t": np.ones((1, 2))}, {"t": np.full((1, 2), np.nan)}),
    ):
        odd = HeadSums()
        odd.add(found, wanted)
        assert odd.figures("a", "tasks", "fp32", None).verdict == "failed"
    scores = HeadSums()
    wanted = np.array([[1.0, 3.0], [4.0, 2.0]], np.float32)
    scores.add({"t": wanted + np.array([[0.0, 0.0], [-3.0, 0.0]])}, {"t": wanted})
    found = scores.figures("a", "tasks", "fp32", 1.0)
    assert (found.max_abs_error, found.largest, found.same_best) == (3.0, 4.0, 0.5)
    assert found.relative_error == 0.75 and found.mean_abs_error == 0.75
