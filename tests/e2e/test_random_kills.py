"""Runs that are killed at random moments again and again lose no checkpoint and change no bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megatron_ds.checkpoint.folders import shared_folders
from megatron_ds.checkpoint.local import nodes
from tests.e2e.runs import ENDLESS, RANKS, TIMING_KEYS, Launcher, Record, Run, Settings
from tests.object_server import BUCKET, s3_server

KILLS = 50
IN_START_UP = 0.2
"""Part of the kills that are drawn from the start-up; the others follow the first iteration."""
START_UP_S = 2.5
TRAINING_S = 0.8
REPORTED = re.compile(r"saved (?:local )?checkpoint at iteration +(\d+)")
LOADED = re.compile(r"^ loading checkpoint from .* at iteration (\d+)$", re.MULTILINE)
KINDS: dict[str, Settings] = {
    "synchronous": {"save_interval": 2, "keep_last": 3},
    "asynchronous": {"save_interval": 2, "keep_last": 3, "async_save": True},
    "local": {"save_interval": ENDLESS, "local_save_interval": 1},
    "store": {"save_interval": 2, "keep_last": 3, "async_save": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as variables:
        yield variables


def steps_by_iteration(metrics: Path) -> dict[int, Record]:
    """Complete records of steps, without timings."""
    text = metrics.read_text() if metrics.exists() else ""
    records = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return {
        each["iteration"]: {k: v for k, v in each.items() if k not in TIMING_KEYS}
        for each in records
        if "lm_loss" in each
    }


def phase_of(output: str, folder: Path, started_at: float) -> str:
    """What a run was doing when it was killed."""
    if "\n iteration " not in output:
        return "start-up"
    partial = folder.glob("*/.incomplete-*")  # of an earlier run, too, until the next save
    if any(path.stat().st_ctime > started_at for path in partial):
        return "save"
    is_saving = output.count("saving checkpoint at") > len(REPORTED.findall(output))
    return "save" if is_saving else "training"


def kill(run: Run, draw: random.Random) -> None:
    """Kills all ranks, or one of a run that trains, at a random moment.

    After the loss of one, the others end. At the start they would wait for it.
    """
    victim = draw.choice((0, 1, None))
    if draw.random() < IN_START_UP:
        time.sleep(draw.uniform(0.0, START_UP_S))
        victim = None
    else:
        run.wait_until(lambda: "\n iteration " in run.output)
        time.sleep(draw.uniform(0.0, TRAINING_S))
    if victim is None:
        run.kill()
    else:
        os.kill(run.pids[victim], signal.SIGKILL)
        assert run.wait().codes[victim] == -signal.SIGKILL


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_kills_at_random_moments_lose_no_checkpoint_and_change_no_bit(
    kind: str, launcher: Launcher, base: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each run resumes from the newest checkpoint that any run before it has reported, or a newer
    one; all steps that any of them has recorded are those of one uninterrupted run.

    Claim (checkpoints): nor do 200 kills at random moments of runs that save synchronously,
    asynchronously, to local folders and to a store: each resumes from the newest checkpoint that
    was reported, or a newer one, and every recorded step equals an uninterrupted run, bit for bit
    """
    seed = list(KINDS).index(kind)
    draw = random.Random(seed)
    metrics = tmp_path / "metrics.jsonl"
    environment: Mapping[str, str] = {}
    settings = {**base, "global_batch_size": 4, "train_iters": ENDLESS, **KINDS[kind]}
    run = {**settings, "save": tmp_path / "run", "metrics_jsonl": metrics}
    if kind == "store":
        environment = request.getfixturevalue("server")
        run |= {"save": f"s3://{BUCKET}/run", "checkpoint_staging_dir": tmp_path / "staging-$RANK"}
    if kind == "local":
        run["local_checkpoint_dir"] = tmp_path / "node-$RANK"
    run["load"] = run["save"]
    reported = 0
    resumes = Counter[str]()
    phases = Counter[str]()
    seen = dict[int, list[Record]]()

    def record(output: str) -> None:
        nonlocal reported
        assert "[checkpoint-skipped]" not in output
        if loaded := LOADED.findall(output):
            assert int(loaded[-1]) >= reported
            resumes["of a checkpoint"] += 1
        else:
            assert reported == 0 or "\n iteration " not in output
        reported = max([reported, *map(int, REPORTED.findall(output))])
        for iteration, step in steps_by_iteration(metrics).items():
            if step not in (different := seen.setdefault(iteration, [])):
                different.append(step)

    for _ in range(KILLS):
        started_at = time.time()
        started = launcher.start(run, ranks=RANKS, environment=environment)
        kill(started, draw)
        launcher.wait_until_all_ended()
        phases[phase_of(started.output, tmp_path, started_at)] += 1
        record(started.output)
    last = max(seen) + 4
    finished = launcher.start({**run, "exit_interval": last}, ranks=RANKS, environment=environment)
    record(finished.succeed())
    whole = {**settings, "save": tmp_path / "whole", "save_interval": ENDLESS}
    whole |= {"local_save_interval": None, "async_save": False, "exit_interval": last}
    launcher.start(whole, ranks=RANKS).succeed()
    expected = steps_by_iteration(tmp_path / "whole" / "metrics.jsonl")
    print(f"{kind}: seed {seed}, {KILLS} kills {dict(phases)}, {last} iterations, {dict(resumes)}")
    assert seen == {iteration: [step] for iteration, step in expected.items()}
    assert phases["save"] > 0
    # Killed starts may leave the files by which ranks ask who shares a folder, for a day.
    hidden = {path.name for path in tmp_path.glob("*/.*")}
    assert not {name for name in hidden if not name.startswith((nodes.TOKEN, shared_folders.TOKEN))}
