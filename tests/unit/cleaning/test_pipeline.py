"""The cleaning pipeline in one process: fields, order, counts, formats, interruptions."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.cleaning.command import final_report
from megatron_ds.cleaning.decontamination import TaskOptions
from megatron_ds.cleaning.find_duplicates import DuplicateOptions
from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.cleaning.pipeline import clean
from megatron_ds.cleaning.stats import Counts, StageCounts
from megatron_ds.cleaning.url_lists import UrlListOptions
from megatron_ds.config import TokenizerConfig
from megatron_ds.config.problems import UserError
from megatron_ds.preprocess.documents.inputs import InputSpec
from tests.cleaning_runs import corpus, everything, files, write
from tests.faults import is_killed_at
from tests.problems import codes, fields, raises_problem

TASK = "one two three four five six seven eight nine ten eleven twelve thirteen"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def options(source: Path, *stages: str, **other: Any) -> CleaningOptions:
    output = str(source.parent / "out.jsonl")
    inputs = InputSpec(paths=(str(source),))
    return CleaningOptions(inputs, **{"output": output, "stages": stages, "min_chars": 3, **other})


def output(source: Path) -> list[dict[str, Any]]:
    return lines_of(source.parent / "out.jsonl")


def test_fields_are_kept_and_unchanged_lines_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    same = b'{"id":1.50, "text":"\\u0061bc" ,"x": {"y": null}}'
    source.write_bytes(
        b"\xef\xbb\xbf" + same + b'  \r\n{"text": "sch\\u00c3\\u00b6n", "n": [1, 2]}'
    )
    clean(options(source, "fix"))
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert lines == [same, '{"text": "schön", "n": [1, 2]}'.encode()]


def test_nested_keys_and_non_text_fields(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"meta": {"text": "schÃ¶n", "n": 1}, "title": "\ud800", "url": "https://a.org"},
        {"meta.text": "schÃ¶n", "meta": 1},
    )
    clean(options(source, "fix", json_key="meta.text"))
    assert output(source) == [
        {"meta": {"text": "schön", "n": 1}, "title": "\ud800", "url": "https://a.org"},
        {"meta.text": "schön", "meta": 1},
    ]


def test_stages_run_in_order_and_are_counted(tmp_path: Path) -> None:
    pad = "Some words are here. "
    source = write(
        tmp_path / "in.jsonl",
        {"text": "a first text"},
        {"text": "A FIRST  text"},
        {"text": "ab"},
        {"text": f"{pad}{TASK}. {pad}"},
        {"text": f"{pad}{TASK}. {pad}"},
        {"text": pad},
        {"no": "text"},
        {"text": TASK},
    )
    tasks = write(tmp_path / "tasks.jsonl", {"q": TASK})
    settings = TaskOptions(
        eval_task_files=(str(tasks),), contamination_margin_chars=0, min_fragment_chars=1
    )
    chosen = options(source, "length", "exact", "decontaminate", tasks=settings)
    counts = clean(replace(chosen, dropped_output=str(tmp_path / "dropped.jsonl")))
    assert [line["text"] for line in output(source)] == ["a first text", *[pad.strip()] * 2, pad]
    assert counts.stages == {
        "length": StageCounts(7, 0, 0, Counter({"fewer than 3 characters": 1}), 2),
        "exact": StageCounts(6, 0, 0, Counter({"exact duplicate": 2}), 128),
        "decontaminate": StageCounts(4, 1, 1, Counter({"task text": 1}), len(TASK)),
    }
    assert [stage.left for stage in counts.stages.values()] == [6, 4, 4]
    assert (counts.before.documents, counts.after.documents) == (7, 4)
    assert counts.bad == {"missing key": 1}
    dropped = [list(line.values()) for line in lines_of(tmp_path / "dropped.jsonl")]
    stages = [(2, "exact"), (3, "length"), (5, "exact"), (8, "decontaminate")]
    assert [tuple(values[1:3]) for values in dropped] == stages
    assert dropped[1] == [str(source), 3, "length", "fewer than 3 characters", {"text": "ab"}]
    (bad,) = lines_of(tmp_path / "out.jsonl.quarantine")
    assert (bad["line"], bad["reason"]) == (7, "missing key")
    # Decontamination runs first; its fragments are duplicates of each other.
    clean(replace(chosen, stages=("length", "decontaminate", "exact")))
    assert [line["text"] for line in output(source)] == ["a first text", pad.strip()]


def test_documents_without_urls_are_counted(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"text": "abc", "url": "https://a.org/x.pdf"},
        {"text": "def", "url": None},
        {"text": "ghi", "url": "https://a.org/"},
        {"text": "jkl"},
    )
    counts = clean(options(source, "url"))
    assert [line["text"] for line in output(source)] == ["def", "ghi", "jkl"]
    assert counts.without_url == 2
    assert counts.stages["url"].dropped == {"unwanted kind of file": 1}


def test_output_is_independent_of_workers(tmp_path: Path) -> None:
    written = []
    for workers in (1, 3):
        corpus(tmp_path)
        counts = clean(everything(tmp_path, workers=workers))
        written.append(files(tmp_path))
    assert written[0] == written[1]
    names = {"dropped.jsonl", "in.jsonl", "out.jsonl.gz", "out.jsonl.gz.quarantine", "report.json"}
    assert written[0].keys() == names
    kept = [json.loads(line) for line in gzip.decompress(written[0]["out.jsonl.gz"]).splitlines()]
    ids = [line.get("id", 300) for line in kept]
    assert ids == sorted(ids)
    assert len(ids) == counts.after.documents
    assert counts.stages["exact"].dropped["exact duplicate"] > 50
    assert counts.stages["near"].dropped["near duplicate"] > 50
    assert Counts.from_json(json.loads(written[0]["report.json"])) == counts


def test_input_and_output_formats(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    documents = [{"text": f"text {number}", "n": number} for number in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(documents), tmp_path / "in.parquet")
    for suffix, opened in ((".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)):
        out = tmp_path / "new" / f"out.jsonl{suffix}"
        dropped = tmp_path / "other" / suffix / "dropped.jsonl"
        names = {"output": str(out), "dropped_output": str(dropped)}
        clean(options(tmp_path / "in.parquet", "exact", **names))
        assert dropped.is_file()
        with opened(out, "rt") as file:
            assert [json.loads(line) for line in file] == documents


def test_without_stages_lines_are_merged(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"no": "text"}\n5\n{"text": 5}')
    counts = clean(options(source))
    assert (tmp_path / "out.jsonl").read_text() == '{"no": "text"}\n{"text": 5}\n'
    assert counts.bad == {"wrong type": 1}
    summary, rejected, written = final_report(counts, options(source), 0.5)
    assert summary == "merged 2 documents in 0.5 s (4 documents/s)"
    assert "1 wrong type" in rejected
    assert "out.jsonl" in written


def test_numbers_that_json_lacks_are_written_as_null(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    row = {"text": "some text", "n": float("nan"), "more": {"list": [1.5, float("-inf")]}}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text('{"text": "schÃ¶n", "n": NaN}\n')
    expected = {
        "in.parquet": {"text": "some text", "n": None, "more": {"list": [1.5, None]}},
        "in.jsonl": {"text": "schön", "n": None},
    }
    for name, document in expected.items():
        clean(options(tmp_path / name, "fix"))
        text = (tmp_path / "out.jsonl").read_text()
        assert json.loads(text, parse_constant=pytest.fail) == document


def test_resume_rejects_changed_inputs_and_settings(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    clean(everything(tmp_path))
    wanted = files(tmp_path)
    for name in set(wanted) - {"in.jsonl"}:
        (tmp_path / name).unlink()
    assert is_killed_at("os.replace:3", lambda: clean(everything(tmp_path)))
    then = source.stat().st_mtime_ns
    os.utime(source, ns=(then, then + 1))
    with raises_problem("resumed-run-differs", contains=str(source)):
        clean(everything(tmp_path, resume=True))
    os.utime(source, ns=(then, then))
    with raises_problem("resumed-run-differs", contains="min-chars"):
        clean(everything(tmp_path, resume=True, min_chars=9))
    clean(everything(tmp_path, resume=True))
    assert files(tmp_path) == wanted


def test_empty_result_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "abc"}, {"no": 1})
    (tmp_path / "out.jsonl").write_text("of an earlier run")
    with raises_problem("no-documents-left", contains="1 fewer than 9 characters (length)"):
        clean(options(source, "length", min_chars=9))
    assert (tmp_path / "out.jsonl").read_text() == "of an earlier run"
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "abc"})
    wrong = options(
        source,
        "length",
        "lenght",
        "length",
        "language",
        "decontaminate",
        output=str(source),
        report=f"{__file__}/report.pdf",
        languages=("klingon",),
        min_language_score=2.0,
        min_chars=-1,
        workers=0,
        tasks=TaskOptions(eval_task_files=(str(tmp_path / "none"),), ngram_size=5),
    )
    with pytest.raises(UserError) as caught:
        clean(wrong)
    assert sorted(codes(caught.value.problems)) == [
        "cleaning-output-is-input",
        "language-not-supported",
        "min-ngram-size-too-large",
        "no-input-file",
        "not-a-folder",
        "out-of-range",
        "out-of-range",
        "out-of-range",
        "repeated-stage",
        "report-suffix",
        "unknown-stage",
    ]


@pytest.mark.parametrize(
    ("stages", "other", "names"),
    [
        (("length",), {"url_blacklist": ("no such file",)}, ("url_blacklist",)),
        (("exact",), {"min_tokens": 5}, ("min_tokens",)),
        (("exact",), {"languages": ()}, None),
        (("length",), {"tokenizer": TokenizerConfig(vocab_file="none")}, ("tokenizer_type",)),
        (
            ("length",),
            {"tasks": TaskOptions(eval_task_files=("no such file",), min_ngram_size=99)},
            ("eval_task_files",),
        ),
    ],
)
def test_option_of_a_stage_that_does_not_run_is_only_a_warning(
    tmp_path: Path, stages: tuple[str, ...], other: dict[str, Any], names: tuple[str, ...] | None
) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "abc"})
    chosen = options(source, *stages, **other)
    clean(chosen)
    assert len(output(source)) == 1
    found = list(chosen.warnings())
    assert set(codes(found)) <= {"no-effect"}
    assert fields(found) == ([] if names is None else [names])


@pytest.mark.parametrize(
    ("chosen", "code", "path"),
    [
        ({"output": "in.jsonl"}, "cleaning-output-is-input", "in.jsonl"),
        ({"dropped_output": "hosts.txt"}, "cleaning-output-is-input", "hosts.txt"),
        ({"report": "tasks.json"}, "cleaning-output-is-input", "tasks.json"),
        ({"output": "a.json", "report": "a.json"}, "cleaning-outputs-collide", "a.json"),
        ({"dropped_output": "out.jsonl.quarantine"}, "cleaning-outputs-collide", "out.jsonl"),
        ({"dropped_output": "more/d.jsonl"}, "cleaning-output-in-input", "more/d.jsonl"),
    ],
)
def test_outputs_must_not_overlap_inputs_or_each_other(
    tmp_path: Path, chosen: dict[str, str], code: str, path: str
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "hosts.txt").write_text("a.org\n")
    write(tmp_path / "more" / "x.jsonl", {"text": "abc"})
    source = write(tmp_path / "in.jsonl", {"text": "abc"})
    tasks = write(tmp_path / "tasks.json", {"q": TASK})
    before = files_below(tmp_path)
    paths = {flag: str(tmp_path / name) for flag, name in chosen.items()}
    wrong = replace(
        options(source, "url", "decontaminate", **paths),
        inputs=InputSpec(paths=(str(tmp_path / "*.jsonl"), str(tmp_path / "more"))),
        url_blacklist=(str(tmp_path / "hosts.txt"),),
        tasks=TaskOptions(eval_task_files=(str(tasks),)),
    )
    with raises_problem(code, contains=str(tmp_path / path)):
        clean(wrong)
    assert files_below(tmp_path) == before


def test_missing_packages_are_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("ftfy", "py3langid", "py3langid.langid", "rensa"):
        monkeypatch.setitem(sys.modules, module, None)
    source = write(tmp_path / "in.jsonl", {"text": "abc"})
    with pytest.raises(UserError) as caught:
        clean(options(source, "fix", "language", "exact", "near"))
    problems = caught.value.problems
    assert codes(problems) == ["library-missing"] * 3
    for problem, package in zip(problems, ("ftfy", "py3langid", "rensa"), strict=True):
        assert package in str(problem)
    assert clean(options(source, "length", "exact")).after.documents == 1


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_output_that_a_rename_would_replace_is_rejected(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "abc"})
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for chosen in (
        options(source, "length", output=pipe),
        options(source, "length", dropped_output=str(tmp_path)),
        DuplicateOptions(inputs=(str(source), "id"), output=pipe),
        UrlListOptions(path=str(source), output=pipe),
    ):
        assert codes(chosen.problems()) == ["output-not-a-regular-file"]
