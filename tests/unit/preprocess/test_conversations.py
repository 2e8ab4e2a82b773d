"""Conversations: the ids and the loss mask of transformers, refused ones, and options.

Claim (samples): conversations have the ids and the loss mask of transformers' chat templates
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import Table, parquet

from megatron_ds.data.token_files import inspect_pair
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.preprocess import command as preprocess_data
from megatron_ds.preprocess.documents.sentence_splitter import SPLITTERS
from tests import chats
from tests.chats import CONVERSATIONS, TEMPLATES, WITH_TOOLS, assistant, unmarked, user
from tests.problems import printed_codes
from tests.unit.conftest import Run

TOOL = preprocess_data
NAME = "messages_document"


def flags(
    folder: Path, template: str | None, *more: object, workers: int = 1
) -> tuple[object, ...]:
    tokenizer = chats.write_tokenizer(folder / "tokenizer", template)
    kind = ("--tokenizer-type", "HFTokenizer", "--tokenizer-model", tokenizer)
    return ("--output-prefix", folder / "out", "--chat", "--workers", workers, *kind, *more)


def read(prefix: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and loss mask of each document."""
    file = IndexedDataset(prefix)
    assert file.loss_spans is not None
    mask = np.zeros(file.tokens.size, np.int64)
    for first, end in file.loss_spans.tolist():
        mask[first:end] = 1
    starts = file.pointers // file.dtype.itemsize
    return [
        (file.get(index).tolist(), mask[start : start + len(file.get(index))].tolist())
        for index, start in enumerate(starts.tolist())
    ]


def expected(folder: Path, conversation: dict[str, Any]) -> tuple[list[int], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    encoded = tokenizer.apply_chat_template(
        conversation["messages"],
        tools=conversation.get("tools"),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    return encoded["input_ids"], encoded["assistant_masks"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(
    name: str, tmp_path: Path, run: Run, run_tool: Run
) -> None:
    conversations = CONVERSATIONS + [WITH_TOOLS] * (name == "llama")
    lines = chats.write_lines(tmp_path / "in.jsonl", conversations)
    # Chunks of one conversation, and several workers, change nothing.
    more = ("--input", lines, "--chunk-size", 1)
    printed = run(*flags(tmp_path, TEMPLATES[name], *more, workers=2))
    assert printed_codes(printed.err) == []
    wanted = [expected(tmp_path, conversation) for conversation in conversations]
    assert read(tmp_path / f"out_{NAME}") == wanted
    assert all(0 < sum(mask) < len(mask) for _, mask in wanted)
    inspected = run_tool(inspect_pair, tmp_path / f"out_{NAME}", "--json")
    shown = json.loads(inspected.out)
    assert shown["tokens_with_loss"] == sum(sum(mask) for _, mask in wanted)


@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_answers_of_a_template_without_marks_follow_its_prompt(
    name: str, tmp_path: Path, run: Run
) -> None:
    """They are what a template with marks has, up to the token that ends a message."""
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    run(*flags(tmp_path, TEMPLATES[name], "--input", lines))
    marked = read(tmp_path / f"out_{NAME}")
    template = tmp_path / "template.jinja"
    template.write_text(unmarked(TEMPLATES[name]))
    printed = run(
        *flags(tmp_path, None, "--input", lines, "--chat-template", template, "--overwrite")
    )
    assert printed_codes(printed.err) == ["chat-template-without-marks"]
    assert read(tmp_path / f"out_{NAME}") == marked


CHANGING = unmarked(chats.CHATML).replace(
    "+ message.role", "+ ('' if loop.last else 'old ') + message.role"
)
"""Writes earlier messages in another way."""
ENDLESS = unmarked(chats.CHATML).replace("<|im_end|>", "")


@pytest.mark.parametrize(
    ("template", "code"), [(CHANGING, "answer-not-after-prompt"), (ENDLESS, "answer-without-end")]
)
def test_answers_that_cannot_be_found_are_rejected(
    template: str, code: str, tmp_path: Path, run: Run
) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    given = flags(tmp_path, template, "--input", lines, "--fail-on-bad-document")
    printed = run(*given, status=1)
    assert f"{lines}:1: " in printed.err
    assert f"[{code}]" in printed.err


def test_sharegpt_and_parquet_give_the_same(tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    run(*flags(tmp_path, chats.CHATML, "--input", lines))
    wanted = read(tmp_path / f"out_{NAME}")
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [
        {
            "conversations": [
                {"from": names[message["role"]], "value": message["content"]}
                for message in conversation["messages"]
            ]
        }
        for conversation in CONVERSATIONS
    ]
    lines = chats.write_lines(tmp_path / "in.jsonl", shared)
    run(*flags(tmp_path, chats.CHATML, "--input", lines, "--overwrite"))
    assert read(tmp_path / f"out_{NAME}") == wanted
    rows = [{**conversation, "tools": None, "source": "x"} for conversation in CONVERSATIONS]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "in.parquet")
    run(*flags(tmp_path, chats.CHATML, "--input", tmp_path / "in.parquet", "--overwrite"))
    assert read(tmp_path / f"out_{NAME}") == wanted


BAD: dict[str, Any] = {
    "empty": {"messages": []},
    "no list": {"messages": "hello"},
    "no object": {"messages": ["hello"]},
    "role": {"messages": [user("a"), {"role": "bot", "content": "b"}]},
    "from": {"conversations": [{"from": "robot", "value": "a"}]},
    "content": {"messages": [user("a"), {"role": "assistant"}]},
    "number": {"messages": [user("a"), {"role": "assistant", "content": 3}]},
    "text": {"text": "a document"},
    "list": [user("a"), assistant("b")],
    "tools": {"messages": [user("a"), assistant("b")], "tools": "3"},
    "json": '{"messages": [',
}
NO_ANSWER = {"messages": [user("a")]}


@pytest.mark.parametrize("name", BAD)
def test_bad_conversations_are_named_by_file_and_line(name: str, tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", [CONVERSATIONS[0], BAD[name]])
    given = flags(tmp_path, chats.CHATML, "--input", lines)
    printed = run(*given, "--fail-on-bad-document", status=1)
    assert printed_codes(printed.err)[-1] == "rejected-document"
    assert f"{lines}:2: " in printed.err


def test_bad_conversations_are_listed_and_left_out(tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", [CONVERSATIONS[0], *BAD.values()])
    run(*flags(tmp_path, chats.CHATML, "--input", lines))
    assert len(read(tmp_path / f"out_{NAME}")) == 1
    rejected = map(json.loads, (tmp_path / "out.quarantine").read_text().splitlines())
    places = [(each["file"], each["line"]) for each in rejected]
    assert places == [(str(lines), line) for line in range(2, 2 + len(BAD))]


def test_conversations_need_an_answer_that_the_template_accepts(tmp_path: Path, run: Run) -> None:
    refusing = chats.CHATML + "{{ raise_exception('no') if messages[0].content == 'x' }}"
    bad = {"messages": [user("x"), assistant("b")]}
    lines = chats.write_lines(tmp_path / "in.jsonl", [NO_ANSWER, CONVERSATIONS[0], bad])
    run(*flags(tmp_path, refusing, "--input", lines))
    assert len(read(tmp_path / f"out_{NAME}")) == 1
    rejected = map(json.loads, (tmp_path / "out.quarantine").read_text().splitlines())
    reasons = [(entry["line"], entry["reason"]) for entry in rejected]
    assert reasons == [(1, "no answer"), (3, "refused by the chat template")]


def test_options_that_do_not_fit_are_refused(tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    cases: list[tuple[str | None, tuple[object, ...], str, int]] = [
        (chats.CHATML, ("--append-eod",), "mutually-exclusive", 2),
        (chats.CHATML, ("--prepend-bos",), "mutually-exclusive", 2),
        (
            chats.CHATML,
            ("--split-sentences", "--sentence-splitter", SPLITTERS[1]),
            "mutually-exclusive",
            2,
        ),
        (chats.CHATML, ("--json-keys", "a", "b"), "conversations-of-one-key", 2),
        (None, (), "chat-template-required", 1),
        (None, ("--chat-template", tmp_path / "none"), "tokenizer-file-unreadable", 1),
    ]
    for template, more, code, status in cases:
        printed = run(*flags(tmp_path, template, "--input", lines, *more), status=status)
        assert printed_codes(printed.err) == [code]
    other = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 10)
    given = flags(tmp_path, chats.CHATML)[:3]
    printed = run(*given, "--input", lines, *other, status=1)
    assert printed_codes(printed.err) == ["chat-tokenizer-unsupported"]


def test_a_tokenizer_that_splits_special_tokens_is_refused(tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    given = flags(tmp_path, chats.CHATML, "--input", lines)
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "split_special_tokens": True}
    path.write_text(json.dumps(settings))
    assert printed_codes(run(*given, status=1).err) == ["chat-tokenizer-splits"]


def test_a_template_needs_the_end_token_that_it_names(tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    given = flags(tmp_path, chats.PLAIN, "--input", lines)
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    assert printed_codes(run(*given, status=1).err) == ["chat-template-without-end"]


def test_a_template_with_a_date_is_warned_about(tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    dated = chats.CHATML + "{{ strftime_now('%Y') }}"
    printed = run(*flags(tmp_path, dated, "--input", lines))
    assert printed_codes(printed.err) == ["chat-template-with-date"]


def test_another_template_is_another_run(tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS)
    run(*flags(tmp_path, chats.CHATML, "--input", lines))
    assert "nothing left" in run(*flags(tmp_path, chats.CHATML, "--input", lines)).err
    printed = run(*flags(tmp_path, chats.PLAIN, "--input", lines), status=2)
    assert "resumed-run-differs" in printed_codes(printed.err)


@pytest.mark.parametrize("count", [2, 3])
def test_shards_give_the_same_files(count: int, tmp_path: Path, run: Run) -> None:
    lines = chats.write_lines(tmp_path / "in.jsonl", CONVERSATIONS * 3)
    given = flags(tmp_path, chats.CHATML, "--input", lines)
    run(*given)
    wanted = [(tmp_path / f"out_{NAME}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    for path in tmp_path.glob("out*"):
        path.unlink()
    for index in range(count):
        run(*given, "--shard", f"{index}/{count}")
    assert wanted == [
        (tmp_path / f"out_{NAME}{suffix}").read_bytes() for suffix in (".bin", ".idx")
    ]
