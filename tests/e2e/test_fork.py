"""A decay that is forked from a checkpoint of a run equals the run that had it from the start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ds.checkpoint.metadata import read_run
from megatron_ds.loading.programs import fork as tool
from megatron_ds.usage import command as data_usage
from tests.e2e.runs import Launcher, Settings, checkpoint_differences, steps
from tests.problems import printed_codes

FORKED = 4
DECAY = 3
STABLE: Settings = {
    "global_batch_size": 4,
    "train_iters": 40,
    "lr_warmup_iters": 2,
    "lr_decay_style": "WSD",
    "lr_wsd_decay_iters": 10,
    "min_lr": 1e-4,
    "save_interval": FORKED,
}


def test_a_fork_equals_the_run_with_its_schedule_from_the_start(
    launcher: Launcher,
    base: Settings,
    tmp_path: Path,
    run_tool: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of the run's checkpoint are deleted before the fork starts.

    Claim (checkpoints): a decay that `tools/fork.py` starts from a checkpoint equals, bit for bit,
    the run with this decay from the start
    """
    run, fork, whole = (tmp_path / name for name in ("run", "fork", "whole"))
    decay: Settings = {"lr_wsd_decay_iters": DECAY, "lr_wsd_decay_style": "minus_sqrt"}
    logs = {"metrics_csv": tmp_path / "metrics.csv", "exit_interval": FORKED + 1}
    started = launcher.start({**base, **STABLE, **logs, "save": run})
    expected = {**base, **STABLE, **decay, "train_iters": FORKED + DECAY, "save": whole}
    uninterrupted = launcher.start(expected)
    started.succeed()
    flags = ("--lr-wsd-decay-iters", DECAY, "--lr-wsd-decay-style", "minus_sqrt")
    start = (run, "--at", FORKED)
    printed = run_tool(tool, *start, "--save", fork, "--exit-interval", 100, *flags)
    assert printed.err == ""
    assert f"python pretrain_gpt.py --config {fork}/fork.yaml" in printed.out
    _reject_what_cannot_be_forked(run, fork, tmp_path / "new", run_tool)
    by_tokens = run_tool(tool, *start, "--save", tmp_path / "tokens", "--lr-wsd-decay-tokens", 384)
    settings = yaml.safe_load((tmp_path / "tokens" / "fork.yaml").read_text())
    assert (settings["train-tokens"], by_tokens.err) == (FORKED * 4 * 32 + 384, "")
    assert settings.keys().isdisjoint({"train-iters", "lr-wsd-decay-iters", "metrics-csv"})
    cosine = run_tool(tool, *start, "--save", tmp_path / "cos", "--lr-decay-style", "cosine")
    assert printed_codes(cosine.err) == ["fork-rates-differ"]
    left_out = tmp_path / "out.txt"
    left_out.write_text("tokens:3")
    start_without = (run, "--step", FORKED, "--exclude", left_out, "--save", tmp_path / "without")
    assert "fork.yaml" in run_tool(data_usage, *start_without).out
    settings = yaml.safe_load((tmp_path / "without" / "fork.yaml").read_text())
    assert settings["exclude-documents"] == str(left_out)
    with monkeypatch.context() as patch:  # as across file systems
        patch.setattr(os, "link", lambda *paths: os.open(os.devnull, os.O_DIRECTORY))
        run_tool(tool, *start, "--save", tmp_path / "far", *flags)
    assert (tmp_path / "far" / f"global_step{FORKED}").resolve() == run / f"global_step{FORKED}"
    for path in (run / f"global_step{FORKED}").iterdir():
        if path.is_file():
            path.unlink()

    output = launcher.start({"config": fork / "fork.yaml"}).succeed()
    assert "resume-setting-changed" not in output  # the fork was asked for
    uninterrupted.succeed()
    assert steps(fork) == steps(whole)[FORKED:]
    last = f"global_step{FORKED + DECAY}"
    found = checkpoint_differences(fork / last, whole / last)
    assert not found, found[:10]
    parent = json.loads((fork / "parent.json").read_text())
    branches = [read_run(path).run.branch for path in (fork / f"global_step{FORKED}", fork / last)]
    assert branches[1].segments[:-1] == branches[0].segments
    assert branches[1].segments[-1][1] == FORKED
    assert (parent["run"], parent["branch"]) == (str(run), branches[0].segments[-1][0])
    assert parent["changed"]["--train-iters"] == [40, FORKED + DECAY]


def _reject_what_cannot_be_forked(
    run: Path, taken: Path, new: Path, run_tool: Callable[..., Any]
) -> None:
    """No such checkpoint, another order of the data, no decay in the run, an output with files."""
    for flags, code in (
        (("--at", FORKED - 1), "ckpt-step-missing"),
        (("--at", FORKED, "--seed", 7), "resume-data-order-changed"),
        (("--at", FORKED, "--train-iters", 8), "annealing-exceeds-decay"),
        (("--at", FORKED, "--save", taken), "output-folder-not-empty"),
        (("--at", FORKED, "--stages", "{name: a, train-iters: 5}"), "fork-with-stages"),
    ):
        save = () if "--save" in flags else ("--save", new)
        assert printed_codes(run_tool(tool, run, *flags, *save, status=1).err) == [code]
    assert not new.exists()
    url = run_tool(tool, run, "--at", FORKED, "--save", "s3://bucket/fork", status=2)
    assert printed_codes(url.err) == ["fork-at-url"]
