"""Rows of embeddings in prompts: as transformers' `inputs_embeds`, whichever way they go."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
import torch

from headport.bundle import Bundle
from headport.errors import ExportError, LoweringError, ParityError, PromptError, UsageError
from headport.export import command
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.command import Options, export
from headport.export.embedded import check_embeddable, check_embedded, check_takes_rows
from headport.export.parity import Embedded, prove
from headport.given_rows import EMBEDDING_ROWS, EMBEDDINGS, GivenRows
from headport.inspection import describe
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.merge.command import Options as MergeOptions
from headport.merge.command import merge
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.runtime import Generator, Parts
from headport.runtime.engine import command as engine_command
from headport.runtime.engine.options import Options as EngineOptions
from headport.runtime.triton.command import Options as TritonOptions
from headport.runtime.triton.command import triton
from headport.selftest import run_selftest

RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(6, 64)).astype(np.float32)
PROMPTS: list[tuple[Any, ...]] = [
    ([5, 9], IMAGE, [7, 8]),
    (IMAGE[:2], [4]),
    ([3, 200, 31], IMAGE[3:4]),
    (IMAGE,),
    ([81, 3], IMAGE[2:5].astype(np.float64), [9], IMAGE[:1], [250, 12]),
]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def portable(tiny_gemma2: Path, said: dict[str, str], tmp_path_factory) -> Bundle:
    """Its embedding is scaled; what the parity says of other rows is taken down on the way."""

    def prove_both(preview: Bundle, plan: Any, reference: Any, heads: Any, given: Embedded) -> Any:
        for name, rows in (("another", given.rows * 1.05), ("order", given.rows[::-1])):
            spoilt = Embedded(given.plan, np.ascontiguousarray(rows), given.reference)
            try:
                prove(preview, plan, reference, heads, spoilt)
            except ParityError as error:
                said[name] = str(error)
        return prove(preview, plan, reference, heads, given)

    output = tmp_path_factory.mktemp("parts") / "b"
    options = Options(model=str(tiny_gemma2), output=output, inputs_embeds=True)
    with mock.patch.object(command, "prove", prove_both):
        return export(options)


@pytest.fixture(scope="module")
def lowered(portable: Bundle, tmp_path_factory) -> Bundle:
    output = tmp_path_factory.mktemp("parts") / "lowered"
    return lower(LowerOptions(bundle=portable.path, output=output, target="ort-cpu"))


@pytest.fixture(scope="module", params=["portable", "ort-cpu"])
def bundle(request: pytest.FixtureRequest, portable: Bundle, lowered: Bundle) -> Bundle:
    return portable if request.param == "portable" else lowered


@pytest.fixture(scope="module")
def model(tiny_gemma2: Path) -> Any:
    return load_model(find_checkpoint(str(tiny_gemma2)))


def embeds(model: Any, parts: tuple[Any, ...]) -> torch.Tensor:
    look_up = model.get_input_embeddings()
    found = [
        torch.from_numpy(p).float() if isinstance(p, np.ndarray) else look_up(torch.tensor(p))
        for p in parts
    ]
    return torch.cat(found)[None].detach()


def generated(model: Any, parts: tuple[Any, ...], **options: Any) -> list[int]:
    given = embeds(model, parts)
    mask = torch.ones(given.shape[:2], dtype=torch.int64)
    found = model.generate(
        inputs_embeds=given, attention_mask=mask, do_sample=False, eos_token_id=None, **options
    )
    return found[0].tolist()


@pytest.fixture(scope="module")
def replies(model: Any) -> list[list[int]]:
    """What transformers says to each prompt, and with beams to the first one."""
    found = [generated(model, parts, max_new_tokens=8) for parts in PROMPTS]
    return [*found, generated(model, PROMPTS[0], max_new_tokens=5, num_beams=3)]


def test_replies_are_those_of_transformers(bundle: Bundle, model: Any, replies: list[list[int]]):
    with Generator(bundle, slots=2, prefill_chunk=3) as generator:
        prompts = [Parts(*parts) for parts in PROMPTS]
        found = generator.generate([*prompts, [3, 4, 5]], max_new_tokens=8, eos_token_id=[])
        assert [reply.token_ids for reply in found[:-1]] == replies[:-1]
        with torch.no_grad():
            expected = model(inputs_embeds=embeds(model, PROMPTS[4])).logits[0].numpy()
        assert np.abs(generator.logits(prompts[4]) - expected).max() < 1e-5
        assert generator.hidden_states(prompts[4]).shape == (9, 64)
        [beam] = generator.generate(prompts[0], max_new_tokens=5, num_beams=3, eos_token_id=[])
        assert beam.token_ids == replies[-1]
        # A step by one row, between steps by tokens.
        with Generator(bundle, slots=1, prefill_chunk=1) as single:
            again = single.generate(prompts, max_new_tokens=8, eos_token_id=[])
        assert [r.token_ids for r in again] == [r.token_ids for r in found[:-1]]


def test_rules_see_tokens_and_limits_count_rows(portable: Bundle):
    seen = []

    def watch(context: Any, scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
        seen.append((list(context.prompt_token_ids), context.prompt_length))
        return scores

    with Generator(portable) as generator:
        prompt = Parts(*PROMPTS[0])
        [reply] = generator.generate(prompt, max_new_tokens=3, process_scores=watch)
        assert reply.prompt_token_ids == [5, 9, 7, 8] and seen[0] == ([5, 9, 7, 8], 10)
        options = {"max_new_tokens": 4, "eos_token_id": []}
        [first] = generator.generate(Parts(IMAGE), **options)
        # As in transformers, a row is no token that could be repeated.
        [again] = generator.generate(Parts(IMAGE), repetition_penalty=1.0 + 1e-9, **options)
        assert first.token_ids == again.token_ids
        with pytest.raises(PromptError, match="prompt 0 has 62 tokens and 3 more"):
            generator.generate(Parts(np.ones((62, 64), np.float32)), max_new_tokens=3)


def test_rows_are_kept_no_longer_than_their_prompt(portable: Bundle):
    with Generator(portable) as generator:
        rows = generator._runner.given
        for _ in range(3):
            generator.generate(Parts(IMAGE, [3]), max_new_tokens=2)
            generator.logits(Parts([3], IMAGE))
        gc.collect()
        assert len(rows._blocks) == 0


def test_a_cache_is_taken_over_up_to_the_first_row(portable: Bundle):
    with Generator(portable, slots=1, prefill_chunk=2) as generator:
        prompts = [Parts([7, 8, 9, 10], rows, [3, 3]) for rows in (IMAGE, IMAGE * 3)]
        apart = [generator.logits(prompt)[-1] for prompt in prompts]
        assert not np.allclose(*apart, atol=1e-2)
        options = {"max_new_tokens": 1, "logprobs": 1, "eos_token_id": []}
        for prompt, logits, reused in zip(prompts, apart, (0, 4), strict=True):
            [found] = generator.generate(prompt, **options)
            expected = logits.max() - np.log(np.exp(logits).sum())
            assert abs(found.logprobs[0].logprob - expected) < 1e-5
            assert generator.stats.reused_tokens == reused


def test_texts_are_parts(portable: Bundle):
    with Generator(portable) as generator:
        found = generator.logits(Parts("The head", IMAGE[:1], " is"))
        ids = generator.encode("The head")
        end = generator.encode(" is")
        assert np.array_equal(found, generator.logits(Parts(ids, IMAGE[:1], end)))


def test_the_parity_finds_other_rows(portable: Bundle, said: dict[str, str]):
    assert said.keys() == {"another", "order"}
    assert all("embeddings_" in message for message in said.values())
    parity = portable.manifest.provenance.stages[0].report["parity"]
    assert sum(name.startswith("embeddings_") for name in parity["cases"]) == 5
    assert portable.manifest.provenance.stages[0].options["inputs_embeds"] is True


def test_what_it_says_of_itself(bundle: Bundle):
    assert "tokens, and rows of 64 numbers in their place" in describe(bundle).text()
    assert run_selftest(bundle)
    assert {EMBEDDINGS, EMBEDDING_ROWS} <= {port.name for port in bundle.manifest.backbone.inputs}


def test_an_int8_bundle_reads_them(portable: Bundle, model: Any, tmp_path: Path):
    made = quantize(
        QuantizeOptions(
            portable.path, tmp_path / "q", head="int8", backbone="int8", embedding="int8"
        )
    )
    low = lower(LowerOptions(bundle=made.path, output=tmp_path / "l", target="ort-cpu"))
    with torch.no_grad():
        expected = model(inputs_embeds=embeds(model, PROMPTS[0])).logits[0].numpy()
    for each in (made, low):
        with Generator(each) as generator:
            found = generator.logits(Parts(*PROMPTS[0]))
        assert np.abs(found - expected).mean() < 0.1 * np.abs(expected).mean()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "prompt 0: it is empty"),
        (([3], IMAGE[:, :5]), r"prompt 0: part 1 is \[6, 5\], \[rows, 64\] was expected"),
        ((IMAGE[0],), r"part 0 is \[64\], \[rows, 64\] was expected"),
        ((np.full((1, 64), np.nan, np.float32),), "part 0 holds values that are not finite"),
        (([3, -1],), r"part 0 holds -1, ids from 0 to 256 were expected, or float rows"),
        ((None,), r"part 0 is NoneType, a text, a list of ids or a NumPy array"),
        ((torch.from_numpy(IMAGE),), r"part 0 is Tensor \[6, 64\], .* a tensor becomes one by"),
        ((IMAGE.tolist(),), "part 0 is list, a text"),
        ((np.array(3),), r"part 0 is ndarray \[\], a text"),
    ],
)
def test_parts_that_cannot_be_read(parts, message, portable):
    with Generator(portable) as generator, pytest.raises(PromptError, match=message):
        generator.generate(Parts(*parts))


def test_bundles_and_calls_that_take_tokens_alone(portable, tiny_bundle):
    with Generator(tiny_bundle) as generator:
        with pytest.raises(PromptError, match=r"prompt 1: part 0 .*export the model with --inputs"):
            generator.generate([[3], Parts(IMAGE)])
        expected = generator.generate([[3, 4]], max_new_tokens=3)
        assert generator.generate(Parts([3], [4]), max_new_tokens=3) == expected
        with pytest.raises(PromptError, match="prompt 1 holds 999"):
            generator.generate([Parts([3]), [999]])
    with Generator(portable) as generator, pytest.raises(PromptError, match="a list of ids"):
        generator.score(Parts([3], IMAGE))


def test_targets_without_a_proved_form(portable: Bundle, tmp_path: Path):
    with pytest.raises(LoweringError, match=r"no proved form on ort-cuda .*; lower it to ort-cpu"):
        lower(LowerOptions(bundle=portable.path, output=tmp_path / "l", target="ort-cuda"))
    why = "exported with --inputs-embeds, .* where nothing feeds them; export without it"
    with pytest.raises(UsageError, match=why):
        merge(MergeOptions(portable.path, tmp_path / "m"))
    with pytest.raises(UsageError, match=why):
        triton(TritonOptions(portable.path, tmp_path / "t", backend="onnxruntime"))
    with (
        mock.patch.object(engine_command, "check"),  # whether TensorRT is installed
        pytest.raises(UsageError, match=why),
    ):
        engine_command.engine(EngineOptions(portable.path, tmp_path / "e", backend="tensorrt"))


def test_models_that_read_tokens_alone(tiny_gemma2: Path):
    checkpoint = find_checkpoint(str(tiny_gemma2))
    with pytest.raises(ExportError, match=r"--inputs-embeds: .* this is a token model; leave"):
        check_embeddable(checkpoint, "token")

    class Reads(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> None: ...

    with pytest.raises(ExportError, match="Reads takes no inputs_embeds, only token ids"):
        check_takes_rows(Reads())


GRAPH = """<ir_version: 11, opset_import: ["": 23]>
backbone (int64[b, s] input_ids, int64[b, s] embedding_rows, float[g, 2] embeddings,
          float[9, 2] table) => (float[b, s, 2] y) {
  zero = Constant <value_int = 0> ()
  some = Less (embedding_rows, zero)
  last = Constant <value_ints = [-1]> ()
  column = Unsqueeze (some, last)
  all = Shape (input_ids)
  ids = Reshape (input_ids, all)
  found = Gather (table, ids)
  %s
}"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Where (column, found, found)", "looks its tokens up by another module"),
        (
            "rows = Gather (embeddings, embedding_rows)\n  twice = Gather (table, input_ids)\n"
            "  sum = Add (found, twice)\n  y = Where (column, sum, rows)",
            "looks token ids up in 2 tables, one was expected",
        ),
        (
            "rows = Gather (embeddings, embedding_rows)\n  same = Equal (input_ids, zero)\n"
            "  wide = Unsqueeze (same, last)\n  kept = Where (wide, rows, found)\n"
            "  y = Where (column, kept, rows)",
            "gives token ids to Equal too",
        ),
    ],
)
def test_graphs_in_which_a_row_would_not_stand_for_a_token(body, message):
    plain = "rows = Gather (embeddings, embedding_rows)\n  y = Where (column, found, rows)"
    check_embedded(ir.from_onnx_text(GRAPH % plain), "Plain")
    with pytest.raises(ExportError, match=f"--inputs-embeds: Odd {message}"):
        check_embedded(ir.from_onnx_text(GRAPH % body), "Odd")


def test_a_row_has_an_id_of_its_own():
    rows = GivenRows(2, np.float16)
    first, second = rows.add(np.ones((2, 2))), rows.add(np.full((1, 2), 3.0))
    assert (list(first), list(second)) == ([-1, -2], [-3])
    feeds = rows.feeds(np.array([[5, -3], [-2, 0]]))
    assert feeds["input_ids"].tolist() == [[5, 0], [0, 0]]
    assert feeds[EMBEDDING_ROWS].tolist() == [[-1, 0], [1, -1]]
    assert feeds[EMBEDDINGS].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert feeds[EMBEDDINGS].dtype == np.float16
    assert rows.feeds(np.array([[5]]))[EMBEDDINGS].shape == (1, 2)
    assert not rows.holds(np.full((1, 2), 1e6))
