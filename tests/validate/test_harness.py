"""lm-evaluation-harness: the bundle gives what the harness's own hf backend gives.

Skipped where lm_eval is not installed; `make harness` runs it in an environment of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headport.errors import UsageError
from headport.validate.harness import main, register

HARNESS = find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HARNESS, reason="lm_eval is not installed: make harness")

CHOICES = [
    {
        "question": f"The head number {i} is the last",
        "choices": [" matrix", " of", " a model"],
        "a": i % 3,
    }
    for i in range(5)
]
TEXTS = [{"text": "The head turns a state into one logit per token. " * n} for n in (1, 2, 6)]
PROMPTS = [
    {"prompt": "The head is the", "answer": "last"},
    {"prompt": "Quantisation rounds " * 12, "answer": "weights"},  # longer than what fits
    {"prompt": "", "answer": "none"},
]
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: a
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "local_generation": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["of", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
ROWS = {"local_choice": CHOICES, "local_rolling": TEXTS, "local_generation": PROMPTS[:2]}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, body in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, ROWS[name])))
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        head = f"task: {name}\ntest_split: test\n{source}"
        (folder / f"{name}.yaml").write_text(head + body.lstrip())
    return folder


def evaluated(model: str, settings: dict[str, Any], tasks: Path) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model=model,
        model_args=settings,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=1,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )


def answers(found: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


@needs_harness
def test_the_bundle_gives_what_the_hf_backend_gives(
    tiny_llama: Path, tiny_bundle: Path, tasks: Path
) -> None:
    register()
    ours = evaluated("headport", {"bundle": str(tiny_bundle), "threads": 1}, tasks)
    theirs = evaluated("hf", {"pretrained": str(tiny_llama), "dtype": "float32"}, tasks)
    for task in TASKS:
        for name, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-5), name
    for one, other in zip(
        answers(ours, "local_choice"), answers(theirs, "local_choice"), strict=True
    ):
        assert [bool(greedy) for _, greedy in one] == [bool(greedy) for _, greedy in other]
        assert [float(v) for v, _ in one] == pytest.approx([float(v) for v, _ in other], abs=1e-4)
    rolling = [[float(v) for v in found] for found in answers(ours, "local_rolling")]
    expected = [[float(v) for v in found] for found in answers(theirs, "local_rolling")]
    for one, other in zip(rolling, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    assert answers(ours, "local_generation") == answers(theirs, "local_generation")


@needs_harness
def test_what_has_no_counterpart_is_refused(tiny_bundle: Path) -> None:
    from lm_eval.api.instance import Instance

    from headport.validate.harness_model import HeadportModel

    with pytest.raises(UsageError, match="colour given"):
        HeadportModel(str(tiny_bundle), colour="red")
    model = HeadportModel(str(tiny_bundle), threads=1)
    for arguments, says in (
        ({"max_gen_toks": 4, "penalty_alpha": 0.6}, "penalty_alpha found"),
        ({"max_gen_toks": 64}, "1 to 63 expected"),
    ):
        request = Instance(
            request_type="generate_until", doc={}, arguments=("The head", arguments), idx=0
        )
        with pytest.raises(UsageError, match=says):
            model.generate_until([request])


@needs_harness
def test_the_command_line(tiny_bundle: Path, tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headport.validate.harness", "--model", "headport"]
    command += ["--model_args", f"bundle={tiny_bundle},threads=1", "--tasks", "local_choice"]
    command += ["--include_path", str(tasks), "--output_path", str(tmp_path / "out.json")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "local_choice" in found.stdout and "acc" in found.stdout


@pytest.mark.skipif(HARNESS, reason="lm_eval is installed")
def test_without_lm_eval_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main() == 2
    error = capsys.readouterr().err
    assert "pip install 'lm-eval" in error and error.count("\n") == 1
