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
    assert document["parameters"]["sampling"] == {
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 1.0,
        "min_p": 0.0,
    }
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
