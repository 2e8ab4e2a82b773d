"""The benchmarks' arithmetic, their processes, and one tiny run of each."""

from __future__ import annotations

import argparse
import functools
import json
import math
import operator
import os
import shutil

import pytest
import torch

from benchmarks import data, documents, preprocess, startup, train_step
from benchmarks.common import Contender, in_turn, paired_ratio, this_machine, versions
from benchmarks.train_step import COMPILED, DEEPSPEED, OURS, PLAIN, Report, Setting, Shape
from megatron_ds.data import build_datasets
from megatron_ds.launch.startup_timer import StartupTimer

TINY = Shape(layers=1, hidden=32, heads=2, sequence=16, vocab=128, micro_batch=2)


@pytest.fixture
def start():
    running = []

    def start(*arguments):
        running.append(Contender("the contender", *arguments))
        return running[-1]

    yield start
    for contender in running:
        contender.close()


def test_a_contender_works_in_a_process_of_its_own(start):
    # partial(add, 5) is the work; asked for 3 of it, it reports 5 + 3.
    contender = start(functools.partial, operator.add, 5)
    assert contender.run(3) == 8
    assert contender.run(4) == 9


def test_work_that_fails_gives_its_traceback(start):
    contender = start(functools.partial, operator.truediv, 12)
    with pytest.raises(RuntimeError, match=r"the contender failed:(.|\n)*ZeroDivisionError"):
        contender.run(0)
    assert contender.run(4) == 3


def test_a_contender_that_cannot_be_built_says_why(start):
    with pytest.raises(RuntimeError, match="invalid literal for int"):
        start(int, "x").run(1)


def test_a_contender_that_dies_is_reported(start):
    with pytest.raises(RuntimeError, match="ended with status 3"):
        start(functools.partial, os._exit).run(3)


def test_a_closed_contender_is_gone(start):
    contender = start(functools.partial, operator.add, 1)
    contender.run(1)
    process = contender._process
    contender.close()
    assert process.exitcode == 0


class Recorder:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def run(self, count):
        self.log.append(self.name)
        return (self.name, count)


def test_contenders_take_turns():
    log = []
    reports = in_turn([Recorder("a", log), Recorder("b", log)], rounds=3, count=7)
    assert log == ["a", "b", "a", "b", "a", "b"]
    assert reports == [[("a", 7)] * 3, [("b", 7)] * 3]


def test_the_ratio_pairs_rounds():
    # The machine was slow in the second round, and while we worked in the third.
    ours = [[1.0, 1.0, 9.0], [10.0, 10.0, 10.0], [12.0, 12.0, 12.0]]
    theirs = [[2.0, 2.0, 2.0], [20.0, 1.0, 20.0], [8.0, 8.0, 8.0]]
    assert paired_ratio(ours, theirs) == 0.5


def report(seconds, cpu=1.0):
    return Report([seconds], [cpu], loss=4.0, peak_mib=100.0)


def test_figures_of_a_contender():
    figures = train_step.summary(
        OURS, [report(2.0), report(4.0), report(3.0)], flops=600, tokens=90, rate=400.0
    )
    assert figures["step_seconds"] == 3.0
    assert figures["tokens_per_second"] == 30.0
    assert figures["model_gflops"] == pytest.approx(200e-9)
    assert figures["mfu"] == 0.5
    assert figures["rounds"] == [[2.0], [4.0], [3.0]]


def test_a_target_is_judged_against_the_fastest_of_its_peers():
    reports = {OURS: [report(3.0)], PLAIN: [report(6.0, cpu=2.0)], DEEPSPEED: [report(4.0)]}
    plain, deepspeed = train_step.ratios("fp32", reports)
    assert (plain["step"], plain["cpu"], plain["target"]) == (0.5, 0.5, None)
    assert (deepspeed["step"], deepspeed["target"]) == (0.75, 1.0)


def test_each_number_format_has_its_own_targets():
    reports = {name: [report(1.0)] for name in (OURS, COMPILED, PLAIN, DEEPSPEED)}
    found = train_step.ratios("bf16", reports)
    targets = {(pair["ours"], pair["peer"]): pair["target"] for pair in found}
    assert targets == {
        (OURS, PLAIN): 0.85,
        (OURS, DEEPSPEED): None,
        (COMPILED, PLAIN): 0.7,
        (COMPILED, DEEPSPEED): None,
    }


def test_the_machine_is_named():
    assert this_machine().cores >= 1
    assert this_machine().cpu
    assert versions(["torch"])["torch"].startswith("2.")


def test_all_train_the_same_model_on_the_same_tokens(capsys):
    setting = Setting(TINY, "bf16", threads=1)
    table = train_step.measure(
        setting, train_step.contenders(compiled=False), rounds=1, steps=1, matrix=64
    )
    figures = {row["name"]: row for row in table["contenders"]}
    assert list(figures) == [OURS, PLAIN, DEEPSPEED]
    for row in figures.values():
        # Random tokens and hardly trained: as good as not knowing.
        assert row["last_loss"] == pytest.approx(math.log(TINY.vocab), abs=0.2)
        assert row["step_seconds"] > 0
        assert row["mfu"] > 0
    train_step.show(table, {"settings": {"threads": 1}})
    assert "transformers, DeepSpeed ZeRO-1" in capsys.readouterr().out


def test_preprocessing_against_its_floor(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for number in range(50):
            file.write(
                json.dumps({"text": f"document number {number}: a word, another word"}) + "\n"
            )
    options = argparse.Namespace(
        input=str(corpus), vocab_file=None, merge_file=None, workers=1, rounds=1
    )
    folder = tmp_path / "work"
    folder.mkdir()
    result = preprocess.measure(options, folder)
    (times,) = result["rounds"]
    assert list(times) == ["floor large", "tool large", "tool middle", "tool once"]
    assert result["ratio"] == round(times["tool large"]["wall"] / times["floor large"]["wall"], 3)
    assert result["text_bytes"]["large"] == 16 * result["text_bytes"]["once"]
    assert result["library"] == "fastokens"
    assert "target at most 0.2" in preprocess.report(result)

    (folder / "floor.bin").write_bytes(b"something else")
    with pytest.raises(ValueError, match="different tokens"):
        preprocess.check_equal(folder)


def test_the_figures_of_preprocessing_are_medians_over_the_rounds():
    run = preprocess.Run
    line = "time: ...; all workers together: parsing 1.00 s, encoding by fastokens 0.10 s"
    rounds = [
        {
            "floor large": run(10.0 * slow, 20.0),
            "tool large": run(2.0 * slow, 4.0),
            "tool middle": run(1.0 * slow, 2.0),
            "tool once": run(0.5 * slow, 1.0, line),
        }
        for slow in (1.0, 1.0, 4.0)
    ]
    found = preprocess.figures(rounds, 5_000_000)
    assert (found["ratio"], found["ratio_cpu"]) == (0.2, 0.2)
    assert found["steady_MB_s"] == 60.0
    assert found["once_MB_s"] == 10.0
    busy = [{**one, "tool large": run(0.9, 4.0)} for one in rounds]
    assert preprocess.figures(busy, 5_000_000)["steady_MB_s"] is None
    assert found["once_encoding_MB_s_per_worker"] == 50.0


def test_the_start_up_line_of_a_run_is_understood():
    start = StartupTimer()
    start.mark("settings")
    start.mark("model and engine")
    parts = startup.printed_parts(f"a line\n{start.summary_line()}\nand another\n")
    assert list(parts) == ["interpreter", "settings", "model and engine"]
    assert parts["interpreter"] == pytest.approx(dict(start.phases)["interpreter"], abs=0.01)


def test_the_launcher_takes_what_the_run_does_not():
    starts = [startup.Start(9.0, {"libraries": 4.0, "data": 1.0}) for _ in range(3)]
    parts = startup.parts_of(starts)
    assert parts == {"launcher": 4.0, "libraries": 4.0, "data": 1.0}
    table = startup.report({"--help": 0.5, "first iteration": 9.0}, parts).splitlines()
    assert table[1].split() == ["--help", "0.50", "1.5"]
    assert table[-1].split() == ["data", "1.00"]


def test_documents_are_measured_in_turn_and_compared_round_by_round():
    shape = documents.Shape(samples=2, sequence=24, heads=2, head_dim=8, dtype="float32")
    seconds = documents.measure(shape, mean=5, rounds=2)
    assert [len(taken) for taken in seconds.values()] == [2, 2, 2]
    assert all(second > 0 for taken in seconds.values() for second in taken)

    faster = documents.speedups(
        {documents.LOOP: [1, 2, 4], documents.MASKED: [3, 4, 4], documents.CAUSAL: [1, 1, 1]}
    )

    assert faster == {documents.MASKED: 2, documents.CAUSAL: 0.5}


def test_the_mask_that_documents_are_held_against_is_causal_and_ends_with_them():
    mask = documents.dense(torch.tensor([[0, 0, 1]], dtype=torch.int32))
    assert mask.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_compiled_stand_in_makes_the_same_indexes(tmp_path):
    library = data.compiled(tmp_path)
    ours, theirs = data.our_indexes(2000, 3)(1), data.compiled_indexes(2000, 3, library)(1)
    assert ours["samples"] == theirs["samples"] > 5000
    assert ours["sum"] == theirs["sum"]


def test_a_mixture_of_holes_is_opened_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(build_datasets, "OPENED_AT_START", 0)
    prefixes = list(data.sparse_files(tmp_path / "files", 5, 2000))
    for made in (True, False):
        found = data.mixed_files(prefixes, 2000, str(tmp_path / "cache"))(1)
        assert (found["index"] > 0) == made
    found = data.mixed_order([0.5, 0.5], 2000, str(tmp_path / "order"))(1)
    assert found["reading"] > 0


@pytest.mark.parametrize("cold", [False, True])
def test_every_way_of_reading_gives_a_rate(tmp_path, cold):
    prefix = data.write_tokens(tmp_path, 40)
    ways = (data.bare_loop, data.our_dataset, data.our_rows, data.our_loader)
    for way in ways:
        assert data.run_reading(way, prefix, cold)(40) > 0
    data.drop_pages(prefix)


def test_the_report_of_a_part_has_a_line_for_each_figure():
    text = data.report("index", {"samples": 5, "CPU s": 1234.567, "rounds": "1.0 1.1"})
    assert [line.split()[-1] for line in text.splitlines()[1:]] == ["5", "1,234.57", "1.1"]
