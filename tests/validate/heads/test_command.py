"""Every kind of head against PyTorch: what passes, what each fault fails, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import CheckpointError, ParityError, UsageError
from headport.validate.heads.command import HeadsReport, Options, validate_heads_with
from headport.validate.heads.figures import HeadSums
from headport.validate.heads.reference import HeadsReference
from headport.validate.wire import AskHeads
from tests.export.test_classifier import save_classifier
from tests.export.test_masked import save_masked
from tests.validate.sabotage import read_bytes, read_manifest, sabotage, write_bytes

TEXTS = [{"text": "The head is the last matrix."}, {"text": "It has a row per token."}]


class Local:
    """A reference without its process."""

    def __init__(self, inner: HeadsReference) -> None:
        self.inner = inner
        self._asked: list[AskHeads] = []

    def ready(self) -> Any:
        return self.inner.ready

    def encode(self, texts: Any) -> Any:
        return tuple(tuple(self.inner.tokenizer(text)["input_ids"]) for text in texts)

    def encode_chats(self, chats: Any) -> Any:
        raise AssertionError("conversations are refused before")

    def ask_heads(self, token_ids: Any) -> None:
        self._asked.append(AskHeads(tuple(token_ids.tolist())))

    def read_heads(self) -> Any:
        announced, arrays = self.inner.ask(self._asked.pop(0))
        found: dict[str, Any] = {}
        for (head, name, shape), array in zip(announced.arrays, arrays, strict=True):
            assert array.shape == shape
            found.setdefault(head, {})[name] = array
        return found


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


def test_the_head_of_a_fill_in_model_and_one_beside_it(texts, tmp_path):
    from headport.export.command import Options as Exporting
    from headport.export.command import export
    from headport.export.heads import ValueHead
    from tests.head_models import randomise, save_modules

    model = save_masked(tmp_path / "model", "bert")
    [spec] = save_modules(tmp_path, {"score": randomise(ValueHead(32), 0)})
    bundle = export(Exporting(model=str(model), output=tmp_path / "bundle", head=(spec,))).path
    report = compared(Local(HeadsReference(str(model), f"--head={spec}")), bundle, texts)
    assert report and [found.head for found in report.heads] == ["mlm", "score"]
    with pytest.raises(UsageError, match=r"head score is none of the reference's \(mlm\); pass"):
        compared(Local(HeadsReference(str(model))), bundle, texts)


def test_a_classifier_is_compared_with_its_own_forward(texts, tmp_path):
    from headport.export.command import Options as Exporting
    from headport.export.command import export

    model = save_classifier(tmp_path / "model", "Sequence", num_labels=3)
    bundle = export(Exporting(model=str(model), output=tmp_path / "bundle")).path
    report = compared(Local(HeadsReference(str(model))), bundle, texts)
    [found] = report.heads
    assert report and (found.head, found.kind, found.answers) == ("labels", "tasks", 2)


def test_wrong_use_is_named(reference, headed_bundle, tiny_bundle, tiny_llama, texts, tmp_path):
    with pytest.raises(UsageError, match="it has no head but lm"):
        compared(reference, tiny_bundle, texts)
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


def test_another_tokenizer_ends_the_run(reference, headed_bundle, texts, monkeypatch):
    monkeypatch.setattr(reference, "encode", lambda texts: [(1, 2)] * len(texts))
    with pytest.raises(ParityError, match="differ at token 0"):
        compared(reference, headed_bundle, texts)


def test_nothing_compared_is_no_pass_and_a_missing_answer_is_a_full_miss():
    sums = HeadSums()
    assert sums.figures("a", "value", "fp32", None).verdict == "undecided"
    sums.add({}, {"values": np.ones(3, np.float32)})
    assert sums.figures("a", "value", "fp32", None).verdict == "failed"
    scores = HeadSums()
    wanted = np.array([[1.0, 3.0], [4.0, 2.0]], np.float32)
    scores.add({"t": wanted + np.array([[0.0, 0.0], [-3.0, 0.0]])}, {"t": wanted})
    found = scores.figures("a", "tasks", "fp32", 1.0)
    assert (found.max_abs_error, found.largest, found.same_best) == (3.0, 4.0, 0.5)
    assert found.relative_error == 0.75 and found.mean_abs_error == 0.75
