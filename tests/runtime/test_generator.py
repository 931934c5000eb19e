import msgspec
import numpy as np
import pytest

from headport.errors import BundleError, NonFiniteError, PromptError, RequestError
from headport.runtime import Generation, Generator

END = 256
A, B, C = 64, 65, 66  # ids of the letters a, b, c


@pytest.fixture
def chain() -> np.ndarray:
    """Greedy steps a → b → c → end; every other token leads to a."""
    table = np.zeros((257, 257))
    table[:, A] = 1.0
    for source, target in ((A, B), (B, C), (C, END)):
        table[source, target] = 5.0
    return table


def test_a_reply_from_start_to_end(make, chain):
    [reply] = make(chain).generate("xa")
    assert isinstance(reply, Generation)
    assert reply.token_ids == [B, C, END]  # the stopping EOS included
    assert reply.text == "bc"
    assert reply.finish_reason == "eos"
    assert reply.seed is None  # greedy draws nothing
    assert reply.prompt_token_ids == [87, A]
    assert reply.parameters.max_new_tokens == 62


def test_one_backbone_run_per_step_for_the_whole_batch(make, chain):
    generator = make(chain)
    replies = generator.generate(["c", "xxxb", "a", "x"], max_new_tokens=10)
    assert [r.text for r in replies] == ["", "c", "bc", "abc"]
    assert [r.finish_reason for r in replies] == ["eos"] * 4
    runner = generator._runner
    # Four prompts one by one, then a step for all rows that go on: the longest reply has four
    # tokens, the last of which is not fed back.
    assert runner.steps[:4] == [{0: 1}, {1: 4}, {2: 1}, {3: 1}]
    assert [sorted(step.values()) for step in runner.steps[4:]] == [[1, 1, 1], [1, 1], [1]]
    stats = generator.stats
    assert (stats.requests, stats.prefill_runs, stats.steps) == (1, 4, 3)
    assert (stats.prompt_tokens, stats.new_tokens, stats.most_rows) == (7, 10, 4)


def test_rows_do_not_depend_on_their_batch(make):
    prompts = ["ab", "q", [3, 250, 7, 9, 11], "hello world"]
    options = {"max_new_tokens": 12, "eos_token_id": ()}
    for more in (
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    ):
        together = make().generate(prompts, **options, **more)
        alone = [make().generate([p], **options, **more)[0] for p in prompts]
        reversed_ = make().generate(prompts[::-1], **options, **more)[::-1]
        assert together == alone == reversed_


def test_a_seed_per_prompt_is_the_seed_alone(make):
    options = {"max_new_tokens": 8, "temperature": 1.0, "eos_token_id": ()}
    together = make().generate(["ab", "ab", "ab"], seed=[7, 8, 7], **options)
    assert together[0] == together[2] != together[1]
    assert together[1] == make().generate("ab", seed=8, **options)[0]


def test_a_drawn_seed_is_returned_and_repeats_the_reply(make):
    options = {"max_new_tokens": 16, "temperature": 1.0, "eos_token_id": ()}
    first, second = make().generate(["ab", "ab"], **options)
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert make().generate("ab", seed=second.seed, **options)[0] == second


@pytest.mark.parametrize("more", [{}, {"temperature": 0.9, "seed": 3}])
def test_a_stream_is_the_reply_in_parts(make, more):
    [reply] = make().generate("ab", max_new_tokens=30, **more)
    stream = make().stream("ab", max_new_tokens=30, **more)
    assert stream.seed == reply.seed
    tokens = list(stream)
    assert [t.token_id for t in tokens] == reply.token_ids
    assert "".join(t.text for t in tokens) == reply.text
    assert [t.step for t in tokens] == list(range(len(tokens)))
    assert [t.finish_reason for t in tokens] == [None] * (len(tokens) - 1) + [reply.finish_reason]
    assert stream.generation == reply


def test_a_stream_is_checked_before_its_first_token(make):
    with pytest.raises(PromptError):
        make().stream("")
    stream = make().stream("ab")
    next(stream)
    with pytest.raises(RequestError, match="has not ended"):
        _ = stream.generation


def test_the_limit_ends_a_reply(make, chain):
    [reply] = make(chain).generate("a", max_new_tokens=2)
    assert (reply.token_ids, reply.finish_reason) == ([B, C], "length")


def test_eos_comes_before_the_limit(make, chain):
    [reply] = make(chain).generate("a", max_new_tokens=3)
    assert (reply.token_ids, reply.finish_reason) == ([B, C, END], "eos")


def test_stop_texts(make, chain):
    [reply] = make(chain).generate("xx", stop="bc")
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("a", [A, B, C], "stop")
    [reply] = make(chain, defaults={"stop_strings": ["b"]}).generate("xx")
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("a", [A, B], "stop")
    tokens = list(make(chain).stream("xx", stop=["bc"]))
    assert [t.text for t in tokens] == ["a", "", ""] and tokens[-1].finish_reason == "stop"


def test_end_tokens_come_as_a_list_and_as_a_choice(make, chain):
    listed = make(chain, defaults={"eos_token_id": [C, END]})
    assert listed.generate("a")[0].token_ids == [B, C]
    assert listed.generate("a")[0].text == "bc"  # an end token that is text stays text
    assert listed.generate("a", eos_token_id=B)[0].token_ids == [B]
    assert len(listed.generate("a", eos_token_id=(), max_new_tokens=9)[0].token_ids) == 9


def test_padded_rows_are_never_sampled(make, chain):
    # All true logits are negative, so zeros in padded columns would win.
    padded = np.concatenate([chain - 100.0, np.zeros((257, 63))], axis=1)
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        expected = make(chain - 100.0).generate("a", max_new_tokens=5, **options)
        assert make(padded).generate("a", max_new_tokens=5, **options) == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_raise_with_row_and_step(make, chain, bad):
    broken = chain.copy()
    broken[C, 17] = bad
    generator = make(broken)
    assert generator.generate("a", max_new_tokens=2)[0].token_ids == [B, C]
    with pytest.raises(NonFiniteError, match=r"row 1, step 2: .* position 17"):
        generator.generate([[END], "a"], eos_token_id=())


def test_a_prompt_beyond_the_context_names_both_numbers(make):
    with pytest.raises(PromptError, match=r"60 tokens and 5 more .* context holds 64"):
        make().generate("a" * 60, max_new_tokens=5)
    with pytest.raises(PromptError, match=r"8 tokens and 3 more .* context holds 10"):
        make(options={"max_context": 10}).generate("a" * 8, max_new_tokens=3)


def test_nothing_runs_before_all_checks(make):
    generator = make()
    for prompts, options in (
        (["a", ""], {}),
        (["a", [300]], {}),
        ("a", {"temperature": -1}),
        ("a", {"max_new_tokens": 1000}),
        ("a", {"eos_token_id": 300}),
        ("a", {"nucleus": 0.5}),
    ):
        with pytest.raises(RequestError):
            generator.generate(prompts, **options)
    assert generator._runner.runs == generator.stats.requests == 0


def test_what_a_bundle_must_have(make, make_bundle):
    with pytest.raises(BundleError, match="no head 'lm'"):
        make(heads={})
    with pytest.raises(BundleError, match=r"ids from 0 to 256 .* eos_token_id: 300"):
        make(defaults={"eos_token_id": [3, 300]})
    with pytest.raises(BundleError, match=r"guidance_scale=1.2"):
        make(defaults={"guidance_scale": 1.2})
    make(defaults={"guidance_scale": 1.2}, options={"ignore": ["guidance_scale"]})
    with pytest.raises(RequestError, match="max_context must be from 1 to the model's 64"):
        make(options={"max_context": 65})
    with pytest.raises(RequestError, match="reply_limit must be from 0 up, -5 was given"):
        make(options={"reply_limit": -5})


def test_a_bundle_is_opened_with_its_checks(tmp_path):
    with pytest.raises(BundleError, match="nothing is there"):
        Generator(tmp_path / "nowhere")


def test_defaults_of_the_bundle_hold(make):
    generator = make(
        defaults={"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 3}
    )
    [reply] = generator.generate("ab", seed=4)
    assert len(reply.token_ids) == 3
    assert (reply.parameters.sampling.temperature, reply.parameters.sampling.top_k) == (0.7, 5)
    [again] = make().generate("ab", seed=4, temperature=0.7, top_k=5, max_new_tokens=3)
    assert again.token_ids == reply.token_ids


def test_results_are_plain_data(make):
    [reply] = make().generate("ab", max_new_tokens=np.int64(3), temperature=1.0, seed=np.int64(3))
    assert msgspec.json.decode(msgspec.json.encode(reply))["token_ids"] == reply.token_ids
