"""The command lines of tools/openwebtext/."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.problems import printed_codes
from tools.openwebtext import (
    blacklist_urls,
    clean,
    cleanup_dataset,
    filter_ngrams,
    find_duplicates,
    merge_data,
)

REPOSITORY = Path(__file__).resolve().parents[2]
ENGLISH = "The committee will meet on Thursday to talk about the new bridge over the river. "
TASK = "one two three four five six seven eight nine ten eleven twelve thirteen"


def write(path: Path, *documents: object) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in documents))
    return str(path)


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_complete_pipeline_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    hosts, tasks = tmp_path / "hosts.txt", write(tmp_path / "tasks.jsonl", {"q": TASK})
    hosts.write_text("example.com\n")
    out = tmp_path / "out.jsonl.gz"
    arguments = ["--input", source, "--output", str(out), "--url-blacklist", str(hosts)]
    arguments += ["--eval-task-files", tasks, "--contamination-margin-chars", "0", "--workers", "1"]
    arguments += [
        "--dropped-output",
        str(tmp_path / "dropped.jsonl"),
        "--report",
        str(tmp_path / "r.png"),
    ]
    assert clean.main(arguments) == 0
    kept = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert [line["text"][:9] for line in kept] == ["Thé commi", "The commi"]
    assert kept[1] == {"text": (ENGLISH * 9).strip(), "id": 7}
    output = capsys.readouterr().out.splitlines()
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
        f"wrote {out}, {tmp_path}/dropped.jsonl, {tmp_path}/r.png, {tmp_path}/r.json",
    ]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["stages"]["near"]["dropped"] == {"near duplicate": 1}
    assert sum(report["lengths"]["documents_after"]) == report["documents_after"] == 2
    assert len((tmp_path / "dropped.jsonl").read_text().splitlines()) == 4


def test_comma_separated_stages_and_invalid_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "abc"}, {"text": "abc"}, {"tex": 1})
    out = ["--output", str(tmp_path / "out.jsonl"), "--workers", "1"]
    arguments = ["--input", source, *out, "--stages", "length,exact", "--min-chars", "1"]
    assert clean.main(arguments) == 0
    assert texts(tmp_path / "out.jsonl") == ["abc"]
    output = capsys.readouterr().out
    assert f"rejected: 1 missing key; listed in {tmp_path}/out.jsonl.quarantine" in output
    assert (
        clean.main([*arguments, "--min-tokens", "3", "--languages", "xx", "--num-perm", "1"]) == 2
    )
    output = capsys.readouterr().err
    assert {"min-tokens-without-tokenizer", "out-of-range"} <= set(printed_codes(output))
    assert "--num-perm 1" in output
    assert "Traceback" not in output


def test_missing_column_names_the_flag_of_the_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    arguments = ["--input", str(tmp_path / "in.csv"), "--output", str(tmp_path / "out.jsonl")]
    assert clean.main([*arguments, "--stages", "exact", "--workers", "1"]) == 1
    assert capsys.readouterr().err.endswith("--json-key [column-missing]\n")


def test_tokens_are_counted_with_a_tokenizer(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "hug hug hug"}, {"text": "hug"})
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhug\n")
    arguments = ["--input", source, "--output", str(tmp_path / "out.jsonl"), "--stages", "length"]
    arguments += ["--vocab-file", str(tmp_path / "vocab.txt"), "--tokenizer-type"]
    arguments += ["BertWordPieceLowerCase", "--min-chars", "0", "--min-tokens", "3"]
    assert clean.main([*arguments, "--workers", "1"]) == 0
    assert texts(tmp_path / "out.jsonl") == ["hug hug hug"]


def test_merge_data_accepts_megatron_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "AA").mkdir()
    write(tmp_path / "b.json", {"text": "b"})
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken\n{"title": "no text"}')
    (tmp_path / "AA" / "c.json.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    (tmp_path / "notes.txt").write_text("no JSON")
    monkeypatch.chdir(tmp_path)
    lines = ['{"text": "a"}', '{"title": "no text"}', '{"text": "b"}', '{"text": "c"}']
    for _ in range(2):  # the second run does not merge the output of the first
        assert merge_data.main([]) == 0
        assert (tmp_path / "merged_output.json").read_text().splitlines() == lines
    assert "1 broken JSON; listed in merged_output.json.quarantine" in capsys.readouterr().out
    arguments = ["--json_path", "AA", "b.json", "--output_file", "two.json"]
    assert merge_data.main(arguments) == 0
    assert (tmp_path / "two.json").read_text().splitlines() == lines[:1:-1]
    (tmp_path / "empty").mkdir()
    assert merge_data.main(["--json-path", "empty"]) == 2
    assert printed_codes(capsys.readouterr().err) == ["no-files-to-merge"]


EACH = """
import contextlib, runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    sys.path[:] = [path for path in sys.path if path != repository]
    for module in [name for name in sys.modules if name.split(".")[0] == "tools"]:
        del sys.modules[module]
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
"""


def test_scripts_start_from_any_folder(tmp_path: Path) -> None:
    """Scripts also work if only the package is installed and tools/ is not in sys.path."""
    scripts = sorted((REPOSITORY / "tools" / "openwebtext").glob("*.py"))
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


def test_cleanup_dataset_accepts_megatron_flags(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": ENGLISH * 9}, {"text": "Nine words."})
    out = tmp_path / "out.jsonl"
    assert cleanup_dataset.main([source, str(out), "--workers", "1"]) == 0
    assert texts(out) == [ENGLISH * 9]


def test_filter_ngrams_accepts_megatron_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", {"body": f"A first. Then {TASK}. The last.", "n": 1})
    tasks = write(tmp_path / "lambada.jsonl", {"text": TASK})
    out = tmp_path / "out.jsonl"
    arguments = ["--dedup-dataset", source, "body", "--output", str(out), "--num-threads", "1"]
    small = ["--filter-text-char-len", "1", "--remove-char-each-side", "0"]
    lambada = ["--tasks", "lambada", "--lambada-path", tasks]
    assert filter_ngrams.main([*arguments, *small, *lambada, "--key-threshold", "10"]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"body": "A first.", "n": 1},
        {"body": "The last.", "n": 1},
    ]
    assert printed_codes(capsys.readouterr().err) == ["ignored-flag"]
    assert filter_ngrams.main([*arguments, "--tasks", "squad", "--load-dictionary", "d.pkl"]) == 2
    assert printed_codes(capsys.readouterr().err) == [
        "unsupported-flag",
        "task-not-fetched",
        "required",
    ]


def test_blacklist_urls_accepts_megatron_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "1.txt").write_text("https://b.org/\nhttps://b.org/x.pdf\nno\n\n")
    (tmp_path / "urls" / "2.txt").write_bytes(b"https://a.org/\n\xff\nhttps://b.org/\n")
    out = tmp_path / "out.txt"
    assert blacklist_urls.main([str(tmp_path / "urls"), str(out)]) == 0
    assert out.read_text() == "https://b.org/\nhttps://a.org/\n"
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "kept 2 of 6 addresses"
    assert (
        output[1] == "dropped 1 unwanted kind of file, 1 no address, 1 invalid UTF-8, 1 duplicate"
    )
    (tmp_path / "list.txt").write_text("a.org\n")
    more = ["--url-blacklist", str(tmp_path / "list.txt")]
    assert blacklist_urls.main([str(tmp_path / "urls" / "2.txt"), str(out), *more]) == 0
    assert out.read_text() == "https://b.org/\n"
    assert blacklist_urls.main([str(tmp_path / "none"), str(out)]) == 1
    assert out.read_text() == "https://b.org/\n"


def test_find_duplicates_accepts_megatron_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"w{number}" for number in range(100)]
    one = write(
        tmp_path / "1.jsonl",
        {"id": "a", "text": " ".join(words)},
        {"id": "b", "text": " ".join(words[::-1])},
    )
    two = write(tmp_path / "2.jsonl", {"url": "u", "text": " ".join(words[:97])}, {"text": "x"})
    arguments = ["--inputs", one, "id", two, "url", "--output", str(tmp_path / "out")]
    assert find_duplicates.main([*arguments, "--num-bands", "10"]) == 0
    ((kept, found),) = json.loads((tmp_path / "out").read_text()).items()
    assert kept == "a"
    assert found == [{"u": pytest.approx(93 / 96, abs=0.07)}]
    shown = capsys.readouterr()
    assert "1 of 3 documents are duplicates\nrejected: 1 line\n" in shown.out
    assert f"WARNING: {two}:2: has no key 'url'" in shown.err
    assert "--num-bands" in shown.err
    assert find_duplicates.main([*arguments[:4], *arguments[5:], "--threshold", "2"]) == 2
    problems = capsys.readouterr().err
    assert set(printed_codes(problems)) == {"inputs-not-pairs", "out-of-range"}
    assert "--threshold 2.0" in problems


def test_find_duplicates_rejects_invalid_runs_and_keeps_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "1.jsonl", *[{"id": "a", "text": "x"}] * 30)
    assert find_duplicates.main(["--inputs", one, "id", "--output", one]) == 2
    assert printed_codes(capsys.readouterr().err) == ["list-is-input"]
    out = str(tmp_path / "out")
    assert find_duplicates.main(["--inputs", one, "url", "--output", out]) == 1
    shown = capsys.readouterr().err
    assert printed_codes(shown) == ["no-documents-to-compare"]
    assert shown.count("WARNING: ") == 20
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert find_duplicates.main(["--inputs", one, "id", "--output", out]) == 1
    assert "pip install 'megatron_ds[cleaning]'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["1.jsonl"]
