import json

import pytest
from tokenizers import Tokenizer, processors

from headport.errors import BundleError, RequestError

MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


@pytest.fixture
def chat(make, bundle_folder, tmp_path):
    """`chat(template, adds_bos=…)` → a generator with this template, and its text of ids."""

    def build(template: str | None, *, adds_bos: bool = False, config: dict | None = None):
        inner = Tokenizer.from_file(str(bundle_folder / "tokenizer.json"))
        inner.add_special_tokens(["<s>"])
        if adds_bos:
            inner.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 257)]
            )
        inner.save(str(tmp_path / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "<|end|>"} | (config or {})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        generator = make(folder=tmp_path)
        return lambda messages=MESSAGES, **variables: inner.decode(
            generator.chat_ids(messages, **variables), skip_special_tokens=False
        )

    return build


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_template_with_bos_gives_exactly_one(chat, adds_bos):
    assert chat(PLAIN, adds_bos=adds_bos)() == "<s>user:hi\n"


def test_a_template_without_bos_gets_the_tokenizers(chat):
    template = PLAIN.replace("{{ bos_token }}", "")
    assert chat(template, adds_bos=True)() == "<s>user:hi\n"


def test_neither_adds_bos(chat):
    assert chat(PLAIN.replace("{{ bos_token }}", ""))() == "user:hi\n"


def test_the_reply_is_prompted_for(chat):
    assert chat("{% if add_generation_prompt %}bot:{% endif %}")() == "bot:"
    assert chat("{{ add_generation_prompt }}")(add_generation_prompt=False) == "False"


def test_what_templates_use(chat):
    template = (
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{% for i in range(3) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ tools | tojson }}{{ strftime_now('%%') }}"
    )
    assert chat(template)(tools=[{"a": "<é>"}]) == 'hi01[{"a": "<é>"}]%'


def test_absent_fields_are_absent(chat):
    template = "{{ 'tool_calls' in messages[0] }}"
    assert chat(template)([{"role": "user", "content": "", "tool_calls": None}]) == "False"


def test_the_template_may_stand_in_the_tokenizer_configuration(chat):
    assert chat(None, config={"chat_template": "one"})() == "one"
    named = [{"name": "default", "template": "two"}, {"name": "rag", "template": "three"}]
    assert chat(None, config={"chat_template": named})() == "two"


def test_messages_the_template_refuses(chat):
    with pytest.raises(RequestError, match="refuses these messages: only users"):
        chat("{{ raise_exception('only users') }}")()


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_run_in_a_sandbox(chat, attack):
    with pytest.raises(RequestError, match="refuses"):
        chat(attack)()


def test_messages_must_be_plain(chat):
    with pytest.raises(RequestError, match="plain data"):
        chat(PLAIN)([{"role": "user", "content": object()}])
    with pytest.raises(RequestError, match="mappings with role and content, 'hi' was among them"):
        chat(PLAIN)(["hi"])


def test_bundles_without_a_usable_template(chat):
    with pytest.raises(BundleError, match="no chat template"):
        chat(None)()
    with pytest.raises(BundleError, match="cannot be parsed"):
        chat("{% for %}")()


def test_ids_are_those_of_transformers(tiny_llama, make):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    messages = [{"role": "user", "content": "a < b?"}, {"role": "assistant", "content": "é 🙂"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True)
    assert make(folder=tiny_llama).chat_ids(messages) == list(expected["input_ids"])
