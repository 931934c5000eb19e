import json

import pytest

from headport.cli import main
from headport.command import Outcome
from headport.runtime.command import Options, run

PROMPT = "The head is"


def words(bundle, *more: str) -> list[str]:
    return ["generate", str(bundle), "-p", PROMPT, "--max-new-tokens", "6", *more]


@pytest.fixture
def bundle(tiny_bundle):
    return tiny_bundle


def test_text_streams_to_stdout_and_the_summary_follows(bundle, capsys):
    assert main(words(bundle, "--temperature", "1", "--seed", "5")) == 0
    out, err = capsys.readouterr()
    text, summary = out.rstrip("\n").rsplit("\n", 1)
    outcome = run(Options(bundle=bundle, prompt=PROMPT, max_new_tokens=6, temperature=1.0, seed=5))
    assert isinstance(outcome, Outcome) and outcome.exit_code == 0
    assert text == outcome.document["text"]
    assert summary == outcome.text == "[6 tokens, ended by length, seed 5]"
    assert err == ""


def test_the_document_says_all_that_was_in_effect(bundle, capsys):
    assert main(words(bundle, "--json", "-", "--top-k", "9", "--temperature", "0.5")) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["parameters"]["max_new_tokens"] == 6
    sampling = document["parameters"]["sampling"]
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.5, 9, 1.0)
    assert sampling["repetition_penalty"] == 1.0 and sampling["allowed"] is None
    # No seed was given, so any token may come, the one that ends the reply included.
    token_ids = document["token_ids"]
    ended = token_ids[-1] == 0
    assert document["finish_reason"] == ("eos" if ended else "length")
    assert len(token_ids) == 6 or ended
    assert document["stats"]["steps"] == len(token_ids) - 1
    assert document["stats"]["prefill_runs"] == 1
    assert document["seconds"] > 0 and document["tokens_per_second"] > 0
    assert 0 <= document["seed"] < 2**53
    assert err.rstrip("\n") == document["text"].rstrip("\n")  # stdout belongs to the document


def test_quiet_prints_nothing(bundle, capsys):
    assert main(words(bundle, "--quiet")) == 0
    assert capsys.readouterr().out == ""


def test_chat_uses_the_template(bundle, capsys):
    assert main(words(bundle, "--chat", "--json", "-")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompt_token_ids"][-1] == 0  # the template closes the message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--temperature", "nan"], "temperature must be"),
        (["--top-k", "-1"], "top_k must be"),
        (["--top-p", "0.5"], "top_p would have no effect"),
        (["--max-new-tokens", "500"], "500 more are to follow, but the context holds 64"),
    ],
)
def test_bad_requests_get_one_line_and_exit_2(bundle, capsys, more, message):
    assert main(words(bundle, *more)) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_an_empty_prompt_and_a_missing_bundle(bundle, tmp_path, capsys):
    assert main(["generate", str(bundle), "-p", ""]) == 2
    assert "prompt 0 is empty" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "none"), "-p", "a"]) == 2
    assert "nothing is there" in capsys.readouterr().err


def test_rules_of_the_sampler_reach_it(bundle):
    rules = {"no_repeat_ngram_size": 1, "suppress_tokens": (0, 5), "repetition_penalty": 1.2}
    outcome = run(Options(bundle=bundle, prompt=PROMPT, max_new_tokens=6, logprobs=2, **rules))
    document = outcome.document
    assert len(set(document["token_ids"])) == 6 and not {0, 5} & set(document["token_ids"])
    assert document["parameters"]["sampling"]["suppress_tokens"] == (0, 5)
    assert len(document["logprobs"]) == 6 and len(document["logprobs"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("more", "count"),
    [(("--n", "3", "--temperature", "1", "--seed", "5"), 3), (("--num-beams", "2", "--n", "2"), 2)],
    ids=["samples", "beams"],
)
def test_several_replies_come_one_below_the_other(bundle, capsys, tmp_path, more, count):
    file = tmp_path / "reply.json"
    assert main(words(bundle, "--json", str(file), *more)) == 0
    document = json.loads(file.read_text())
    assert len(document["replies"]) == count and document["tokens_per_second"] is None
    out = capsys.readouterr().out
    assert "[1" in out and f"[{count}" in out and out.count("ended by") == count
    scores = [reply["score"] for reply in document["replies"]]
    assert scores == sorted(scores, reverse=True) if "--num-beams" in more else scores == [None] * 3


def test_early_stopping_is_a_word(bundle):
    options = {"num_beams": 2, "length_penalty": -1.0, "early_stopping": "never"}
    outcome = run(Options(bundle=bundle, prompt=PROMPT, max_new_tokens=4, **options))
    assert outcome.document["parameters"]["beams"] == {
        "num_beams": 2,
        "length_penalty": -1.0,
        "early_stopping": "never",
    }


def test_options_that_do_not_go_together_are_refused(bundle, capsys):
    assert main(words(bundle, "--n", "2")) == 2
    assert "n=2 greedy replies would all be equal" in capsys.readouterr().err
    assert main(words(bundle, "--num-beams", "2", "--temperature", "1")) == 2
    assert "beam search is greedy" in capsys.readouterr().err
