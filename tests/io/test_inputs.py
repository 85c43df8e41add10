"""Inputs of the commands: lines of text, and JSON lines with texts and chats."""

import functools
import json

import ml_collections
import pytest

import command_line
import pairs
from experiments.tasks import questions
from experiments.tasks.config import load_examples
from specjax.checkpoints import load, tokenizers
from specjax.cli import doctor, inputs, main, select
from specjax.decoding.texts import tokenize
from specjax.support import files

EOS = "</s>"  # the mark that the pair's tokenizer puts before every text
TEMPLATE = (
    "{{ eos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'x' %}{{ raise_exception('no role x') }}{% endif %}"
    "[{{ m.role }}]\n{{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ think }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "return"},
    {"role": "user", "content": "value = other\n\nx = 1 \u2028 é"},
]
PROMPT = f"{EOS}[system]\nreturn\n[user]\n{CHAT[1]['content']}\n[assistant]"
NO_TARGET = "no/such/target"  # an error where it is read


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A decoder-only checkpoint whose tokenizer and template both begin with the same mark."""
    directory = pairs.write_qwen(tmp_path_factory.mktemp("chat") / "target")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)


@pytest.fixture
def written(tmp_path):
    """Write lines to a file; objects as JSON."""

    def write(*lines, name="in.jsonl"):
        file = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("\n".join(texts), encoding="utf-8")
        return str(file)

    return write


def test_texts_and_chats(chat_model, written):
    """Texts have their line breaks; other fields and blank lines are skipped."""
    unescaped = '{"input": "a\u2028b"}\r'
    path = written({"input": "a\nb\r\n", "id": 7}, "", {"messages": CHAT}, unescaped, {"input": ""})
    assert inputs.read_texts(path, chat_model) == ["a\nb\r\n", PROMPT, "a\u2028b", ""]


ASK = [{"role": "user", "content": "a"}]
CALL = {"role": "assistant", "tool_calls": [{"id": 7}]}
ASKED = f"{EOS}[user]\na\n"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"tools": [{"name": "f"}]}, f'{EOS}[{{"name": "f"}}][user]\na\n[assistant]'),
        ({"tools": None, "functions": None, "id": 7}, f"{ASKED}[assistant]"),
        ({"chat_template_kwargs": {"think": "no"}}, f"{ASKED}[assistant]no"),
        ({"add_generation_prompt": False}, ASKED),
        ({"continue_final_message": True}, f"{EOS}[user]\na"),
        *(
            ({"messages": [CALL | content]}, f"{EOS}[assistant]\n{said}[{{'id': 7}}]\n[assistant]")
            for content, said in (({}, ""), ({"content": None}, "None"))
        ),
    ],
)
def test_fields_of_a_chat_that_change_its_prompt(fields, prompt, chat_model, written):
    assert inputs.read_texts(written({"messages": ASK} | fields), chat_model) == [prompt]


def test_one_tokenizer_for_all_chats(chat_model, written, monkeypatch):
    read, calls = tokenizers.load, []
    monkeypatch.setattr(tokenizers, "load", lambda path: calls.append(path) or read(path))
    inputs.read_texts(written(*[{"messages": CHAT}] * 3), chat_model)
    assert len(calls) == 1


def test_the_target_is_not_read_without_chats(written):
    assert inputs.read_texts(written({"input": "a"}), NO_TARGET) == ["a"]
    with pytest.raises(FileNotFoundError, match="No such directory: no/such/target"):
        inputs.read_texts(written({"messages": CHAT}), NO_TARGET)


def test_other_files_are_lines_of_text(written):
    """JSON too, unless the name says so."""
    line = '{"input": "a"}'
    for name in ("in.txt", "in.json", "jsonl"):
        assert inputs.read_texts(written(line, "", name=name), NO_TARGET) == [line]


def test_a_chat_has_one_bos(chat_model):
    """The ids of a prompt are those that transformers gives the chat, with the mark once."""
    target = load(chat_model)
    tokenizer = target.tokenizer
    prompt = tokenizers.chat_prompt(tokenizer, CHAT, target.name)
    first, second = tokenizer(prompt)["input_ids"][:2]
    assert first == second == tokenizer.eos_token_id
    (ids,) = tokenize(target, [prompt], 200)
    assert ids.count(first) == 1
    assert ids == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


def test_first_turns_of_questions(chat_model, pair, written, capsys):
    """Prompts are written by the template, or raw where there is none, with one line about it."""
    rows = [
        {"turns": ["a\nb", "c"], "category": "qa"},
        {"turns": ["d"], "input": "e"},
        *[{"turns": ["f"]}] * 2,
    ]
    path = written(*rows)
    prompt = PROMPT.replace("[system]\nreturn\n", "")
    chats = [prompt.replace(CHAT[1]["content"], turn) for turn in ("a\nb", "f", "f")]
    assert inputs.read_texts(path, chat_model) == [chats[0], "e", *chats[1:]]
    assert "raw text" not in capsys.readouterr().err
    assert inputs.read_texts(path, pair.target.name) == ["a\nb", "e", "f", "f"]
    assert capsys.readouterr().err.count("no chat template: prompts are the raw text") == 1


def test_the_task_of_questions_has_prompts(chat_model, written):
    """The first turns for `select` and the experiments are in the target's template."""
    path = written({"turns": ["a"], "category": "qa"}, {"turns": ["b"], "category": "rag"})
    config = ml_collections.ConfigDict(
        {"task": "spec_bench", "split": "test", "data_dir": path, "target": chat_model}
    )
    texts = [one.input for one in load_examples(config)]
    assert texts == [f"{EOS}[user]\n{turn}\n[assistant]" for turn in "ab"]
    config.categories = ("rag",)
    assert [one.input for one in load_examples(config)] == texts[1:]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Hello", "not JSON (Expecting value: line 1 column 1 (char 0)): 'Hello'. Give {"),
        ('{"input": "a"', "not JSON (Expecting ',' delimiter"),
        ("[" * 100_000, "not JSON ("),
        ("9" * 5000, "not JSON ("),
        ("[1]", "not a JSON object: '[1]'. Give {"),
        ('"a"', "not a JSON object: '\"a\"'. Give {"),
        ({}, "neither input nor messages nor turns. Give {"),
        ({"prompt": "a"}, "neither input nor messages nor turns. Give {"),
        ({"input": "a", "messages": CHAT}, "both input and messages. Give {"),
        ({"turns": []}, "turns=[] should be a list of one text or more. Give {"),
        ({"input": None}, "input=None should be a text. Give {"),
        ({"input": ["a"]}, "input=['a'] should be a text. Give {"),
        ({"messages": []}, "messages=[] should be a list of one message or more. Give {"),
        ({"messages": "a"}, "messages='a' should be a list of one message or more. Give {"),
        ({"messages": {"role": "user"}}, "should be a list of one message or more. Give {"),
        ({"messages": [CHAT[0], "a"]}, "messages[1]='a' should be an object whose role and"),
        ({"messages": [{"role": "user"}]}, "whose role and content are texts. Give {"),
        ({"messages": [{"role": 1, "content": "a"}]}, "whose role and content are texts. Give {"),
        ({"messages": [{"role": "a", "content": None}]}, "role and content are texts. Give {"),
        ({"messages": CHAT, "tools": {}}, "tools={} should be a list. Or give the prompt itself"),
        ({"messages": CHAT, "add_generation_prompt": 1}, "add_generation_prompt=1 should be true"),
        ({"messages": CHAT, "documents": [{}]}, "(it does not read 'documents'). Or give"),
        ({"messages": CHAT, "chat_template_kwargs": {"name": 1}}, "(it does not read 'name')"),
        ({"messages": CHAT, "functions": []}, "functions is not followed: what the template reads"),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template is not followed"),
        (
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt exclude each other",
        ),
        ({"input": "a\ud83d"}, "'\\ud83d' is half a character, which no tokenizer reads. Write"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "'\\udc00' is half a character"),
        (
            {"messages": [{"role": "x", "content": "a"}]},
            "refuses the messages (TemplateError: no role x). Or give the prompt itself as input.",
        ),
    ],
)
def test_wrong_lines_are_named(chat_model, written, line, said):
    path = written({"input": "a"}, "", line)
    with pytest.raises(ValueError, match=r"^--input=") as caught:
        inputs.read_texts(path, chat_model)
    message = str(caught.value)
    assert message.startswith(f"--input={path}, line 3: ")
    assert said in message
    assert len(message.splitlines()) == 1


def test_inputs_are_read_up_to_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_BYTES", 8)
    (tmp_path / "x").write_text("12345678")
    assert inputs.read_texts(str(tmp_path / "x"), NO_TARGET) == ["12345678"]
    with open(tmp_path / "x", "wb") as file:
        file.truncate(10**11)
    with pytest.raises(ValueError, match=r"x has more than 8 bytes\. Split it"):
        inputs.read_texts(str(tmp_path / "x"), NO_TARGET)
    monkeypatch.setattr(questions, "MAX_BYTES", 8)
    with pytest.raises(ValueError, match="x has more than 8 bytes, which is too much to read"):
        questions.load(tmp_path / "x")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="there is no standard input"):
        inputs.read_texts("-", NO_TARGET)


def test_a_target_without_a_template(pair, written, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    for target in (pair.target.name, str(tmp_path / "bare")):
        with pytest.raises(ValueError, match=r"line 1: .* has no chat template: .* as input"):
            inputs.read_texts(written({"messages": CHAT}), target)


def test_decode(chat_model, written, tmp_path, monkeypatch, capsys):
    """Rows have the prompts, and an output belongs to them: another chat is refused."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    output = tmp_path / "out.jsonl"
    decode = functools.partial(
        command_line.run, monkeypatch, capsys, "specjax", "decode",
        f"--config.target={chat_model}", "--config.draft=lookup", f"--output={output}",
        "--config.max_new_tokens=4", "--config.max_source_len=200",
    )  # fmt: skip
    outcome = decode(f"--input={written({'input': 'a'}, {'messages': CHAT})}")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert f"loading the chat template of {chat_model}" in outcome.progress
    assert [row["input"] for row in files.read_rows(output)] == ["a", PROMPT]
    assert decode(f"--input={written({'input': 'a'}, {'input': PROMPT})}").status == 0
    other = decode(f"--input={written({'input': 'a'}, {'messages': CHAT[1:]})}")
    assert (other.status, "input was" in other.stderr) == (1, True)


def test_select_and_doctor(chat_model, written):
    """Both leave out blank inputs."""
    path = written({"input": " \n"}, {"messages": CHAT}, {"input": "a\nb"})
    config = select.defaults.get_config("select")
    config.target = chat_model
    assert select.inputs(path, config) == [PROMPT, "a\nb"]
    assert doctor.texts(path, chat_model) == (PROMPT, "a\nb")


@pytest.mark.parametrize("module", [f"specjax {name}" for name in main.COMMANDS[:4]])
def test_mistakes_are_said_in_one_line(module, chat_model, written, tmp_path, monkeypatch, capsys):
    """No model is loaded for a file that is wrong."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    draft = "drafts" if module == "specjax select" else "draft"
    outcome = command_line.run(
        monkeypatch, capsys, module, f"--config.target={chat_model}",
        f"--config.{draft}=lookup", f"--input={written({'messages': []})}",
    )  # fmt: skip
    assert (outcome.status, outcome.stdout) == (1, "")
    assert {*outcome.progress} <= {"loading specjax …"}
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"error: --input={tmp_path / 'in.jsonl'}, line 1: messages=[]")
