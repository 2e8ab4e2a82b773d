"""The benchmarks: their processes, what they compute from measurements, and a tiny run of each.

Tiny runs that take seconds are left to `make proofs`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import operator
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    checkpoint,
    conversion,
    data,
    documents,
    layout_steps,
    long_sequences,
    preprocess,
    scale,
    startup,
    train_step,
)
from benchmarks.accelerator.models import SIZES
from benchmarks.common import Contender, in_turn
from benchmarks.train_step import BARE, COMPILED, DEEPSPEED, OURS, PLAIN, PRODUCTS, Report
from megatron_ds.data import build_datasets
from megatron_ds.launch.startup_timer import StartupTimer
from tests.fork_server import REPOSITORY

TINY = train_step.Shape(layers=1, hidden=32, heads=2, sequence=16, vocab=128, micro_batch=2)


@pytest.mark.parametrize("program", sorted((REPOSITORY / "benchmarks").glob("[!_]*.py")))
def test_a_program_imports_what_it_needs(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{program.stem}")
    if hasattr(module, "main"):
        monkeypatch.setattr("sys.argv", [program.name, "--help"])
        with pytest.raises(SystemExit):
            module.main()
        assert capsys.readouterr().out.startswith(f"usage: {program.name}")


def test_contenders_take_turns_in_their_own_processes() -> None:
    # partial(add, 5) is the work; called with 3, it reports 5 + 3.
    contenders = [Contender("adds", functools.partial, operator.add, n) for n in (5, 6)]
    try:
        assert in_turn(contenders, rounds=2, count=3) == [[8, 8], [9, 9]]
    finally:
        for contender in contenders:
            contender.close()
    assert [contender._process.exitcode for contender in contenders] == [0, 0]


@pytest.mark.parametrize(
    ("build", "argument", "count", "reported"),
    [
        (functools.partial, (operator.truediv, 12), 0, "ZeroDivisionError"),
        (int, ("x",), 1, "invalid literal for int"),
        (functools.partial, (os._exit,), 3, "status 3"),
    ],
    ids=["work fails", "build fails", "process dies"],
)
def test_failure_of_a_contender_is_reported(
    build: Callable[..., Any], argument: tuple[Any, ...], count: int, reported: str
) -> None:
    contender = Contender("fails", build, *argument)
    try:
        with pytest.raises(RuntimeError, match=reported):
            contender.run(count)
        if reported == "ZeroDivisionError":  # a failure of the work does not end the process
            assert contender.run(4) == 3
    finally:
        contender.close()


def test_targets_depend_on_the_dtype_and_the_fastest_peer() -> None:
    seconds = {OURS: 3.0, COMPILED: 3.0, PLAIN: 6.0, DEEPSPEED: 4.0}
    reports = {
        name: [Report([value], [1.0], loss=4.0, peak_mib=100.0)] for name, value in seconds.items()
    }

    def targets(dtype: str) -> dict[tuple[str, str], tuple[float, float | None]]:
        found = train_step.ratios(dtype, reports)
        return {(pair["ours"], pair["peer"]): (pair["step"], pair["target"]) for pair in found}

    assert targets("fp32")[OURS, DEEPSPEED] == (0.75, 1.0)
    assert targets("fp32")[OURS, PLAIN] == (0.5, None)
    reports[PLAIN] = [Report([2.0], [1.0], loss=4.0, peak_mib=100.0)]
    assert targets("bf16") == {
        (OURS, PLAIN): (1.5, 0.85),
        (OURS, DEEPSPEED): (0.75, None),
        (COMPILED, PLAIN): (1.5, 0.7),
        (COMPILED, DEEPSPEED): (0.75, None),
    }


@pytest.mark.proof
def test_all_contenders_train_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    setting = train_step.Setting(TINY, "bf16", threads=1)
    rows = train_step.contenders(compiled=False)
    table = train_step.measure(setting, rows, rounds=1, steps=1, matrix=64)
    names = [row["name"] for row in table["contenders"]]
    assert names == [OURS, BARE, PLAIN, DEEPSPEED, PRODUCTS]
    for row in table["contenders"]:
        if row["name"] != PRODUCTS:
            # Untrained on random tokens: the loss of a uniform distribution.
            assert row["last_loss"] == pytest.approx(math.log(TINY.vocab), abs=0.2)
        assert row["step_seconds"] > 0
        assert row["mfu"] > row["causal_mfu"] > 0
    train_step.show(table, {"settings": {"threads": 1}})
    assert DEEPSPEED in capsys.readouterr().out


@pytest.mark.proof
def test_preprocessing_writes_the_tokens_of_its_floor(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    folder = tmp_path / "work"
    folder.mkdir()
    texts = [f"document number {number}: a word, another word" for number in range(50)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = {"input": str(corpus), "vocab_file": None, "merge_file": None}
    options = argparse.Namespace(**files, workers=1, rounds=1)

    result = preprocess.measure(options, folder)

    (times,) = result["rounds"]
    assert result["ratio"] == round(times["tool large"]["wall"] / times["floor large"]["wall"], 3)
    assert result["text_bytes"]["large"] == 16 * result["text_bytes"]["once"]
    assert preprocess.report(result)
    (folder / "floor.bin").write_bytes(b"something else")
    with pytest.raises(ValueError, match="different tokens"):
        preprocess.check_equal(folder)


def test_preprocessing_reports_medians_over_rounds() -> None:
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
    assert (found["ratio"], found["steady_MB_s"], found["once_MB_s"]) == (0.2, 60.0, 10.0)
    assert found["once_encoding_MB_s_per_worker"] == 50.0
    busy = [{**one, "tool large": run(0.9, 4.0)} for one in rounds]
    assert preprocess.figures(busy, 5_000_000)["steady_MB_s"] is None


def test_startup_parses_the_line_of_a_run() -> None:
    timer = StartupTimer()
    timer.mark("settings")
    parts = startup.printed_parts(f"a line\n{timer.summary_line()}\nand another\n")
    assert parts["interpreter"] == pytest.approx(dict(timer.phases)["interpreter"], abs=0.01)
    starts = [startup.Start(9.0, {"libraries": 4.0, "data": 1.0})] * 3
    assert startup.parts_of(starts) == {"launcher": 4.0, "libraries": 4.0, "data": 1.0}


@pytest.mark.proof
def test_packed_attention_is_compared_with_a_causal_document_mask() -> None:
    mask = documents.dense(torch.tensor([[0, 0, 1]], dtype=torch.int32))
    assert mask.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    shape = documents.Shape(samples=2, sequence=24, heads=2, head_dim=8, dtype="float32")
    seconds = documents.measure(shape, mean=5, rounds=2)
    assert [len(times) for times in seconds.values()] == [2, 2, 2]
    assert all(value > 0 for times in seconds.values() for value in times)
    rounds = {documents.LOOP: [1, 2, 4], documents.MASKED: [3, 4, 4], documents.CAUSAL: [1, 1, 1]}
    assert documents.speedups(rounds) == {documents.MASKED: 2, documents.CAUSAL: 0.5}


@pytest.mark.proof
def test_memory_per_token_of_a_long_sequence(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    shape = "--layers 2 --hidden 128 --heads 2 --vocab 64 --document 256"
    words = f"--lengths 8192 --settings 1 4 {shape} --output {file}".split()
    assert long_sequences.main(words) == 0
    found = json.loads(file.read_text())["peak_bytes_per_token"]
    stored, shared = (found[long_sequences.SETTINGS[row].name]["8192"] for row in (0, 3))
    # Inputs and outputs of four norms; inputs of two layers, of which a rank has half.
    assert stored > 2 * 4 * 128 * 4
    assert stored / 2 > shared > 2 * 128 * 4 / 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_reference_builds_the_same_indexes(tmp_path: Path) -> None:
    library = data.compiled(tmp_path)
    ours = data.our_indexes(2000, 3)(1)
    theirs = data.compiled_indexes(2000, 3, library)(1)
    assert ours["samples"] == theirs["samples"] > 5000
    assert ours["sum"] == theirs["sum"]


def test_indexes_of_a_blend_of_sparse_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_datasets, "OPENED_AT_START", 0)
    prefixes = list(data.sparse_files(tmp_path / "files", 5, 2000))
    for built in (True, False):
        found = data.measure_blend(prefixes, 2000, str(tmp_path / "cache"))(1)
        assert (found["index"] > 0) == built
    assert data.measure_blend_order([0.5, 0.5], 2000, str(tmp_path / "order"))(1)["reading"] > 0


@pytest.mark.parametrize("cold", [False, True])
def test_reading_is_measured_in_every_way(tmp_path: Path, cold: bool) -> None:
    prefix = data.write_tokens(tmp_path, 40)
    for way in (data.bare_loop, data.our_dataset, data.our_rows, data.our_loader):
        assert data.run_reading(way, prefix, cold)(40) > 0


@pytest.mark.proof
def test_checkpoints_are_measured_in_every_way(tmp_path: Path) -> None:
    result = checkpoint.measure(checkpoint.SMALL, tmp_path, rounds=2)
    rates = result["MB_per_s"]
    jobs = {job for job, _, _ in checkpoint.RATIOS} | {peer for _, peer, _ in checkpoint.RATIOS}
    assert rates.keys() == jobs
    assert all(len(each) == 2 and min(each) > 0 for each in rates.values())
    # 14 bytes of a parameter: bf16, fp32 and two moments.
    assert 6.9 < result["checkpoint_bytes"] / result["weight_bytes"] < 9
    assert "save / torch.save" in checkpoint.report(result)


def test_ratios_of_checkpoints_pair_rounds() -> None:
    names = {name for job, peer, _ in checkpoint.RATIOS for name in (job, peer)}
    rates = {name: [1.0, 1.0, 1.0] for name in names}
    rates |= {checkpoint.SAVE: [2.0, 8.0, 3.0], checkpoint.TORCH_SAVE: [1.0, 4.0, 1.0]}
    first = checkpoint.ratios(rates)[0]
    assert (first["job"], first["ratio"], first["target"]) == (checkpoint.SAVE, 2.0, 0.9)


@pytest.mark.proof
def test_conversions_are_measured_in_every_way(tmp_path: Path) -> None:
    """With a program in the place of llama.cpp's converter."""
    theirs = "import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'wb').write(bytes(9))"
    converter = [sys.executable, "-c", theirs]
    result = conversion.measure(conversion.SMALL, tmp_path, 1, converter)
    assert result["seconds"].keys() == {*conversion.OUTPUTS, conversion.BOTH}
    assert [pair["peer"] for pair in result["ratios"]] == [
        conversion.BOTH,
        conversion.COPY,
        conversion.COPY,
    ]
    assert result["bytes"][conversion.COPY] == result["bytes"][conversion.TO_GGUF]
    assert result["bytes"][conversion.CONVERTER] == 9
    assert all(peak > 1e7 for peak in result["peak_bytes"].values())
    assert f"{conversion.TO_GGUF} / {conversion.COPY}" in conversion.report(result)
    some = (conversion.TO_GGUF, conversion.COPY)
    (tmp_path / "some").mkdir()
    result = conversion.measure(conversion.SMALL, tmp_path / "some", 1, (), some)
    assert result["seconds"].keys() == {*some}
    assert [pair["peer"] for pair in result["ratios"]] == [conversion.COPY]


def test_ratios_of_conversions_pair_rounds() -> None:
    seconds = {conversion.TO_GGUF: [1.0, 8.0, 3.0], conversion.COPY: [2.0, 4.0, 1.0]}
    pairs = conversion.ratios(seconds)
    assert [(pair["job"], pair["ratio"], pair["target"]) for pair in pairs] == [
        (conversion.TO_GGUF, 2.0, 1.5)
    ]


def test_ratios_of_compiled_layouts_pair_rounds() -> None:
    """The bound is relative to the other checkout's eager layers, where there is one."""

    def reports(*seconds: float) -> list[layout_steps.Report]:
        return [layout_steps.Report([one], [2 * one], 0.0, 4, 0) for one in seconds]

    sides = {
        layout_steps.EAGER: reports(2.0, 4.0, 8.0),
        layout_steps.COMPILED: reports(1.0, 3.0, 8.0),
    }
    (pair,) = layout_steps.ratios("TP 2", sides)
    assert (pair["ratio"], pair["cpu_ratio"], pair["bound"]) == (0.75, 0.75, layout_steps.BOUND)
    (pair,) = layout_steps.ratios("CP 2", sides)
    assert pair["bound"] is None
    sides[layout_steps.OTHER] = reports(2.0, 4.0, 16.0)
    bounds = {pair["ours"]: pair["bound"] for pair in layout_steps.ratios("TP 2", sides)[1:]}
    assert bounds == {layout_steps.EAGER: None, layout_steps.COMPILED: layout_steps.BOUND}


@pytest.mark.proof
def test_curves_of_the_size_of_a_run_are_measured_and_plotted(tmp_path: Path) -> None:
    """Those that take no run and no second."""
    curves = {
        "start calls": scale.start_calls((8,)),
        "start messages": scale.rows(scale.start_messages(size) for size in (8, 16)),
        "mesh": scale.rows(scale.in_fork(scale.mesh, size) for size in (8, 4096)),
        "manifest": scale.rows(scale.manifest(size) for size in (8, 4096)),
        "index": scale.rows(scale.in_fork(scale.index, size) for size in (10**5, 10**6)),
        "blend": scale.rows(scale.in_fork(scale.blend, size) for size in (10**4, 10**5)),
    }
    assert curves["mesh"]["groups"] == [2, 7]
    assert curves["index"]["bytes"] == curves["index"]["bytes, predicted"]
    assert curves["manifest"]["files"] == [16, 4104]
    runs = {"gloo group": {"ranks": [8.0]}, "checkpoint and log": {"parameters": [1e6]}}
    for panels in scale.PANELS.values():
        for key, _, columns in panels:
            for column in columns if key in runs else ():
                runs[key][column] = [1.0]
    scale.plot(curves | runs, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "scale_data.png",
        "scale_start.png",
    ]


def test_model_flops_utilization() -> None:
    """The exact count is 6 N + 12 L S H of GPT-2, up to the padding of the vocabulary; Megatron-LM
    counts half of the second term."""
    size = SIZES["124m"]
    scores = 12 * 12 * 1024 * 768
    assert size.flops_per_token() == pytest.approx(6 * 123.5e6 + scores, rel=1e-3)
    causal = size.flops_per_token(is_causal=True)
    assert causal == pytest.approx(size.flops_per_token() - scores / 2)
