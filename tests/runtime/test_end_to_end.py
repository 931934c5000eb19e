"""Tiny bundles against PyTorch: free-running tokens, ragged batches, sampled tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headport.runtime import Generator
from tests.runtime.philox import philox4x64

torch = pytest.importorskip("torch")

PROMPTS = ["The head is", [7], "def add(a: int, b: int)", [250, 3, 99, 12, 180, 41, 5]]
NEW = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reference(tiny_llama):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["tiny_bundle", "tiny_lowered"])
def generator(request) -> Generator:
    return Generator(request.getfixturevalue(request.param), threads=1)


def test_greedy_tokens_are_those_of_transformers(generator, reference):
    replies = generator.generate(PROMPTS, max_new_tokens=NEW)
    for reply in replies:
        ids = torch.tensor([reply.prompt_token_ids])
        found = reference.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert reply.token_ids == found[0, ids.shape[1] :].tolist()


def test_logits_and_scores_are_those_of_transformers(generator, reference):
    ids = generator.score(PROMPTS[2])[0].token_ids
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].double()
    np.testing.assert_allclose(generator.logits(ids), expected.numpy(), atol=1e-3)
    nll = torch.nn.functional.cross_entropy(expected[:-1], torch.tensor(ids[1:]), reduction="none")
    np.testing.assert_allclose(generator.score(PROMPTS[2])[0].nll[1:], nll.numpy(), atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 8},
        {"temperature": 1.0, "seed": [1, 2, 3, 4]},
    ],
)
def test_a_row_in_a_ragged_batch_is_the_row_alone(generator, options):
    common = {"max_new_tokens": NEW, "eos_token_id": ()}
    before = generator._runner.runs
    together = generator.generate(PROMPTS, **common, **options)
    # One run for each prompt, and one for all rows per further token.
    assert generator._runner.runs - before == len(PROMPTS) + NEW - 1
    for n, prompt in enumerate(PROMPTS):
        seed = options.get("seed")
        alone_options = options | ({"seed": seed[n]} if isinstance(seed, list) else {})
        [alone] = generator.generate(prompt, **common, **alone_options)
        assert together[n] == alone
        assert list(generator.stream(prompt, **common, **alone_options))[-1].step == NEW - 1


def test_rows_that_end_early_leave_the_others_as_they_are(generator):
    free = generator.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=())
    ends = [reply.token_ids[4] for reply in free[:2]]
    stopped = generator.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=ends)
    assert any(reply.finish_reason == "eos" for reply in stopped)
    for reply, whole in zip(stopped, free, strict=True):
        assert reply.token_ids == whole.token_ids[: len(reply.token_ids)]
        assert reply.finish_reason == "length" or reply.token_ids[-1] in ends


def test_portable_and_lowered_answer_alike(tiny_bundle, tiny_lowered):
    options = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3}
    portable = Generator(tiny_bundle, threads=1).generate(PROMPTS, **options)
    assert Generator(tiny_lowered, threads=1).generate(PROMPTS, **options) == portable


def torch_choice(logits, seed: int, step: int, temperature: float, top_k: int, top_p: float) -> int:
    """The rule of SAMPLING.md written anew, in PyTorch, with transformers' own filters."""
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    scores = (logits / temperature)[None]
    scores = TopKLogitsWarper(top_k)(None, scores)
    scores = TopPLogitsWarper(top_p)(None, scores)[0].double()
    draws = []
    for block in range(-(-len(scores) // 8)):
        for word in philox4x64((block, step, 0, 0), (seed, 0)):
            draws += [word & 0xFFFFFFFF, word >> 32]
    u = (torch.tensor(draws[: len(scores)], dtype=torch.float64) + 0.5) / 2**32
    return int(torch.argmax(scores - torch.log(-torch.log(u))))


def test_sampled_tokens_are_those_of_an_independent_sampler(generator):
    [reply] = generator.generate(
        PROMPTS[0],
        max_new_tokens=NEW,
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        seed=99,
        eos_token_id=(),
    )
    ids = reply.prompt_token_ids + reply.token_ids
    logits = torch.from_numpy(generator.logits(ids))
    for step, token_id in enumerate(reply.token_ids):
        row = logits[len(reply.prompt_token_ids) + step - 1]
        assert torch_choice(row, 99, step, 0.9, 40, 0.95) == token_id
    assert len(set(reply.token_ids)) > NEW / 2


def test_the_example_of_the_user_page_runs(tiny_bundle, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "runtime.md").read_text()
    first, second = (part.split("```", 1)[0] for part in page.split("```python\n")[1:])
    names: dict = {}
    exec(first.replace('"model.bundle"', repr(str(tiny_bundle))), names)
    assert len(names["replies"]) == 2 and names["replies"][0].seed == 7
    assert names["prompt"][-1] == 0
    assert capsys.readouterr().out
    exec(second, names)
    assert capsys.readouterr().out
