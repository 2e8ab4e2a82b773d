"""Chat templates: the text that transformers has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from megatron_ds.tokenizer.chat_template import encode_answers, read_chat_template
from megatron_ds.tokenizer.huggingface import build_hf_tokenizer, pretrained_files
from tests.import_graph import REPOSITORY
from tests.problems import raises_problem

GOLDEN = REPOSITORY / "tests" / "golden" / "tokenizers" / "tokenizer.json"
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("no such role") }}
    {%- endif %}
    {{- "<|" ~ message.role ~ "|>" ~ message.content | trim ~ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
MESSAGES = [
    {"role": "system", "content": " Be brief."},
    {"role": "user", "content": "Café?\n"},
    {"role": "assistant", "content": "<b>No</b>"},
    {"role": "user", "content": "Why"},
]
END = "<|endoftext|>"
TOKEN = {"__type": "AddedToken", "content": END, "lstrip": False, "rstrip": False}
NAMED = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
FOLDERS: dict[str, dict[str, Any]] = {
    "text": {"tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": END}},
    "named": {"tokenizer_config.json": {"chat_template": NAMED, "eos_token": TOKEN}},
    "file": {
        "chat_template.jinja": TEMPLATE,
        "tokenizer_config.json": {"chat_template": "old", "eos_token": END, "bos_token": END},
    },
    "tokens": {
        "tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": END},
        "special_tokens_map.json": {"bos_token": END},
    },
}


def folder_of(folder: Path, files: dict[str, Any]) -> Path:
    shutil.copy(GOLDEN, folder / "tokenizer.json")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_conversations_have_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    """Claim (serving): conversations have the text of transformers' chat templates"""
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path, FOLDERS[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    for path in (folder, folder / "tokenizer.json"):
        ours = read_chat_template(build_hf_tokenizer(str(path), False).folder)
        assert ours is not None
        for count in range(1, len(MESSAGES) + 1):
            expected = theirs.apply_chat_template(
                MESSAGES[:count], tokenize=False, add_generation_prompt=True
            )
            assert ours.render(MESSAGES[:count]) == expected
        with raises_problem("chat-template-failed", "messages", contains="no such role"):
            ours.render([{"role": "tool", "content": "x"}])
        # A copy of the tokenizer's files has all that is needed.
        copied = {file.name for file in pretrained_files(str(path), False)}
        assert copied >= FOLDERS[name].keys()


def test_characters_without_a_token_do_not_extend_an_answer(tmp_path: Path) -> None:
    """transformers marks all that follows such an answer; an answer without a token has no span."""
    library = Library(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, "a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_hf_tokenizer(str(tmp_path), False)
    texts = ["b\na b \n b", "a", "a a"]
    flat, spans = encode_answers(tokenizer, texts, [[(1, 6), (6, 7)], [], [(0, 2), (2, 3)]])
    assert flat.ids.tolist() == [2, 1, 2, 2, 1, 1, 1]
    assert flat.lengths.tolist() == [4, 1, 2]
    assert spans.tolist() == [[1, 3], [5, 6], [6, 7]]


def test_a_tokenizer_may_have_no_template(tmp_path: Path) -> None:
    assert read_chat_template(None) is None
    assert read_chat_template(folder_of(tmp_path, {})) is None
    folder_of(tmp_path, {"tokenizer_config.json": {"eos_token": END}})
    assert read_chat_template(tmp_path) is None
