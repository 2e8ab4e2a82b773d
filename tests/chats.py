"""Tokenizers with chat templates, and conversations, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.import_graph import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "tokenizers" / "tokenizer.json"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|head|>", "<|/head|>")
END = "<|endoftext|>"

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else -%}{{ message.content + '<|im_end|>' }}
{%- endif -%}{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% else %}{% set system = 'Be helpful.' %}{% endif %}
{{- '<|head|>system<|/head|>\\n\\n' + system }}
{%- if tools %}{{ '\\nTools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{%- endif %}{{ '<|eot_id|>' }}
{%- for message in messages %}{{ '<|head|>' + message.role + '<|/head|>\\n\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function | tojson }}
{%- endfor %}{% else %}{{ message.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""
PLAIN = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ message.role | title }}: {{ message.content }}
Assistant:{% endif %}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "plain": PLAIN}


def unmarked(template: str) -> str:
    """A template without its marks of generation."""
    for mark in ("{% generation %}", "{%- generation %}", "{% endgeneration %}"):
        template = template.replace(mark, "")
    return template


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [user("What is 1 + 1?"), assistant("2.")]},
    {
        "messages": [
            {"role": "system", "content": "Answer in English."},
            user("Café?\n"),
            assistant(" <b>No</b>, thé. 🙂 "),
            user("Why"),
            assistant("Because."),
        ]
    },
    {"messages": [user("a"), assistant("b"), user("c")]},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        user("2 + 3?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
            ],
        },
        {"role": "tool", "content": "5"},
        assistant("Five."),
    ],
    "tools": [TOOL],
}


def write_tokenizer(folder: Path, template: str | None) -> Path:
    """A folder of a tokenizer with special tokens for chats, and a template unless None."""
    library = Tokenizer.from_file(str(GOLDEN))
    library.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": "<|begin_of_text|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = folder / "chat_template.jinja"
    file.unlink(missing_ok=True)
    if template is not None:
        file.write_text(template, encoding="utf-8")
    return folder


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    """Strings are lines as they are, other values JSON."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path
