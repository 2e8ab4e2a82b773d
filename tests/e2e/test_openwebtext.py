"""The command lines of tools/openwebtext/."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cleaning_runs import write
from tests.pages import flags as flags_page
from tests.problems import printed_codes
from tools.openwebtext import clean, cleanup_dataset, filter_ngrams

REPOSITORY = Path(__file__).resolve().parents[2]
Run = Callable[..., Any]
ENGLISH = "The committee will meet on Thursday to talk about the new bridge over the river. "
TASK = "one two three four five six seven eight nine ten eleven twelve thirteen"


def script(name: str) -> ModuleType:
    """The program that has a name in another project."""
    return flags_page.load(REPOSITORY / "tools" / "openwebtext" / name)


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_complete_pipeline_in_one_command(tmp_path: Path, run_tool: Run) -> None:
    """Claim (cleaning): one command cleans text: Unicode, language, length, URLs, duplicates,
    decontamination, with a report"""
    numbers = " and ".join(f"the number {number}" for number in range(40))
    long = f"{ENGLISH} Then they counted {numbers}."
    source = write(
        tmp_path / "in.jsonl",
        {"text": long.replace("e", "Ã©", 1), "url": "https://a.org/1"},
        {"text": long + "A word more.", "url": "https://a.org/2"},
        {"text": "short", "url": "https://a.org/3"},
        {"text": "Der Ausschuss tritt am Donnerstag wegen der Brücke zusammen. " * 9},
        {"text": f"{long} {TASK}. {long}", "url": "https://www.example.com/"},
        {"text": f"Another text begins here. {ENGLISH} {TASK}. " + ENGLISH * 9, "id": 7},
    )
    hosts = tmp_path / "hosts.txt"
    tasks = write(tmp_path / "tasks.jsonl", {"q": TASK})
    hosts.write_text("example.com\n")
    out = tmp_path / "out.jsonl.gz"
    dropped = tmp_path / "dropped.jsonl"
    files = ("--input", source, "--output", out, "--dropped-output", dropped)
    files += ("--url-blacklist", hosts, "--eval-task-files", tasks, "--report", tmp_path / "r.json")
    printed = run_tool(clean, *files, "--contamination-margin-chars", 0, "--workers", 1)
    kept = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert [line["text"][:9] for line in kept] == ["Thé commi", "The commi"]
    assert kept[1] == {"text": (ENGLISH * 9).strip(), "id": 7}
    output = printed.out.splitlines()
    assert output[0].startswith("kept 2 of 6 documents, ")
    assert output[1:] == [
        "url: 6 in, 5 out; dropped 1 unwanted host",
        "fix: 5 in, 5 out, 1 changed",
        "length: 5 in, 4 out; dropped 1 fewer than 512 characters",
        "language: 4 in, 3 out; dropped 1 language de",
        "exact: 3 in, 3 out",
        "near: 3 in, 2 out; dropped 1 near duplicate",
        "decontaminate: 2 in, 2 out, 1 changed",
        "without 'url': 2 documents",
        f"wrote {out}, {dropped}, {tmp_path}/r.json",
    ]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["stages"]["near"]["dropped"] == {"near duplicate": 1}
    assert sum(report["lengths"]["documents_after"]) == report["documents_after"] == 2
    assert len(dropped.read_text().splitlines()) == 4


def test_comma_separated_stages_and_invalid_options(tmp_path: Path, run_tool: Run) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "abc"}, {"text": "abc"}, {"tex": 1})
    flags = ("--input", source, "--output", tmp_path / "out.jsonl", "--workers", 1)
    flags += ("--stages", "length,exact", "--min-chars", 1)
    output = run_tool(clean, *flags).out
    assert texts(tmp_path / "out.jsonl") == ["abc"]
    assert f"rejected: 1 missing key; listed in {tmp_path}/out.jsonl.quarantine" in output
    invalid = ("--min-tokens", 3, "--languages", "xx", "--num-perm", 1)
    output = run_tool(clean, *flags, *invalid, status=2).err
    assert {"min-tokens-without-tokenizer", "out-of-range"} <= set(printed_codes(output))
    assert "--num-perm 1" in output
    assert "Traceback" not in output


def test_missing_column_names_the_flag_of_the_tool(tmp_path: Path, run_tool: Run) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    flags = ("--input", tmp_path / "in.csv", "--output", tmp_path / "out.jsonl")
    printed = run_tool(clean, *flags, "--stages", "exact", "--workers", 1, status=1)
    assert printed.err.endswith("--json-key [column-missing]\n")


def test_tokens_are_counted_with_a_tokenizer(tmp_path: Path, run_tool: Run) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "hug hug hug"}, {"text": "hug"})
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhug\n")
    flags = ("--input", source, "--output", tmp_path / "out.jsonl", "--stages", "length")
    kind = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", tmp_path / "vocab.txt")
    run_tool(clean, *flags, *kind, "--min-chars", 0, "--min-tokens", 3, "--workers", 1)
    assert texts(tmp_path / "out.jsonl") == ["hug hug hug"]


def test_merge_data_accepts_megatron_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_tool: Run
) -> None:
    (tmp_path / "AA").mkdir()
    write(tmp_path / "b.json", {"text": "b"})
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken\n{"title": "no text"}')
    (tmp_path / "AA" / "c.json.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    (tmp_path / "notes.txt").write_text("no JSON")
    monkeypatch.chdir(tmp_path)
    lines = ['{"text": "a"}', '{"title": "no text"}', '{"text": "b"}', '{"text": "c"}']
    merge_data = script("merge_data.py")
    for _ in range(2):  # the second run does not merge the output of the first
        printed = run_tool(merge_data)
        assert (tmp_path / "merged_output.json").read_text().splitlines() == lines
        assert "1 broken JSON; listed in merged_output.json.quarantine" in printed.out
    run_tool(merge_data, "--json_path", "AA", "b.json", "--output_file", "two.json")
    assert (tmp_path / "two.json").read_text().splitlines() == lines[:1:-1]
    (tmp_path / "empty").mkdir()
    error = run_tool(merge_data, "--json-path", "empty", status=2).err
    assert printed_codes(error) == ["no-files-to-merge"]


EACH = """
import contextlib, os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    sys.path[:] = [path for path in sys.path if path != repository]
    for module in [name for name in sys.modules if name.split(".")[0] in ("tools", "start_tool")]:
        del sys.modules[module]
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
"""


def test_scripts_start_from_any_folder(tmp_path: Path) -> None:
    """Scripts also work if only the package is installed and the repository is not in sys.path."""
    found = sorted((REPOSITORY / "tools" / "openwebtext").glob("*.py"))
    scripts = [path for path in found if not path.is_symlink()]
    code = f"import sys; repository = {str(REPOSITORY)!r}; import megatron_ds.cleaning\n{EACH}"
    completed = subprocess.run(
        [sys.executable, "-c", code, *map(str, scripts)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    usages = [line for line in completed.stdout.splitlines() if line.startswith("usage: ")]
    assert [line.split()[1] for line in usages] == [script.name for script in scripts]


def test_cleanup_dataset_accepts_megatron_flags(tmp_path: Path, run_tool: Run) -> None:
    source = write(tmp_path / "in.jsonl", {"text": ENGLISH * 9}, {"text": "Nine words."})
    run_tool(cleanup_dataset, source, tmp_path / "out.jsonl", "--workers", 1)
    assert texts(tmp_path / "out.jsonl") == [ENGLISH * 9]


def test_filter_ngrams_accepts_megatron_flags(tmp_path: Path, run_tool: Run) -> None:
    source = write(tmp_path / "in.jsonl", {"body": f"A first. Then {TASK}. The last.", "n": 1})
    tasks = write(tmp_path / "lambada.jsonl", {"text": TASK})
    out = tmp_path / "out.jsonl"
    flags = ("--dedup-dataset", source, "body", "--output", out, "--num-threads", 1)
    small = ("--filter-text-char-len", 1, "--remove-char-each-side", 0, "--key-threshold", 10)
    printed = run_tool(filter_ngrams, *flags, *small, "--tasks", "lambada", "--lambada-path", tasks)
    kept = [{"body": "A first.", "n": 1}, {"body": "The last.", "n": 1}]
    assert [json.loads(line) for line in out.read_text().splitlines()] == kept
    assert printed_codes(printed.err) == ["ignored-flag"]
    wrong = ("--tasks", "squad", "--load-dictionary", "d.pkl")
    found = printed_codes(run_tool(filter_ngrams, *flags, *wrong, status=2).err)
    assert found == ["unsupported-flag", "task-not-fetched", "required"]


def test_blacklist_urls_accepts_megatron_flags(tmp_path: Path, run_tool: Run) -> None:
    urls = tmp_path / "urls"
    out = tmp_path / "out.txt"
    hosts = tmp_path / "list.txt"
    urls.mkdir()
    (urls / "1.txt").write_text("https://b.org/\nhttps://b.org/x.pdf\nno\n\n")
    (urls / "2.txt").write_bytes(b"https://a.org/\n\xff\nhttps://b.org/\n")
    output = run_tool(script("blacklist_urls.py"), urls, out).out.splitlines()
    assert out.read_text() == "https://b.org/\nhttps://a.org/\n"
    assert output[:2] == [
        "kept 2 of 6 addresses",
        "dropped 1 unwanted kind of file, 1 no address, 1 invalid UTF-8, 1 duplicate",
    ]
    hosts.write_text("a.org\n")
    run_tool(script("blacklist_urls.py"), urls / "2.txt", out, "--url-blacklist", hosts)
    assert out.read_text() == "https://b.org/\n"
    run_tool(script("blacklist_urls.py"), tmp_path / "none", out, status=1)
    assert out.read_text() == "https://b.org/\n"


def test_find_duplicates_accepts_megatron_flags(tmp_path: Path, run_tool: Run) -> None:
    words = [f"w{number}" for number in range(100)]
    out = tmp_path / "out"
    rows = ({"id": "a", "text": " ".join(words)}, {"id": "b", "text": " ".join(words[::-1])})
    one = write(tmp_path / "1.jsonl", *rows)
    two = write(tmp_path / "2.jsonl", {"url": "u", "text": " ".join(words[:97])}, {"text": "x"})
    first = ("--output", out, "--inputs", one, "id", two)
    shown = run_tool(script("find_duplicates.py"), *first, "url", "--num-bands", 10)
    ((kept, found),) = json.loads(out.read_text()).items()
    assert kept == "a"
    assert found == [{"u": pytest.approx(93 / 96, abs=0.07)}]
    assert "1 of 3 documents are duplicates\nrejected: 1 line\n" in shown.out
    assert f"WARNING: {two}:2: has no key 'url'" in shown.err
    assert "--num-bands" in shown.err
    problems = run_tool(script("find_duplicates.py"), *first, "--threshold", 2, status=2).err
    assert set(printed_codes(problems)) == {"inputs-not-pairs", "out-of-range"}
    assert "--threshold 2.0" in problems


def test_find_duplicates_rejects_invalid_runs_and_keeps_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_tool: Run
) -> None:
    one = write(tmp_path / "1.jsonl", *[{"id": "a", "text": "x"}] * 30)
    out = tmp_path / "out"
    shown = run_tool(
        script("find_duplicates.py"), "--inputs", one, "id", "--output", one, status=2
    ).err
    assert printed_codes(shown) == ["list-is-input"]
    shown = run_tool(
        script("find_duplicates.py"), "--inputs", one, "url", "--output", out, status=1
    ).err
    assert printed_codes(shown) == ["no-documents-to-compare"]
    assert shown.count("WARNING: ") == 20
    monkeypatch.setitem(sys.modules, "rensa", None)
    shown = run_tool(
        script("find_duplicates.py"), "--inputs", one, "id", "--output", out, status=1
    ).err
    assert "pip install rensa" in shown
    assert os.listdir(tmp_path) == ["1.jsonl"]
