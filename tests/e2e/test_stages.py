"""Runs with stages: killed inside of one and at the start of one, resumed, on other layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_ds.usage.documents import documents_of
from megatron_ds.usage.run_data import RunData
from tests.e2e.conftest import write_corpus
from tests.e2e.runs import Launcher, Settings, checkpoint_differences, steps

Factory = pytest.TempPathFactory

STAGES = [
    {"name": "stable", "train-iters": 2, "lr-warmup-iters": 2, "lr-decay-style": "constant"},
    {
        "name": "mid",
        "train-tokens": "1500",
        "lr-decay-style": "linear",
        "seq-length": 64,
        "global-batch-size": 8,
        "micro-batch-size": 4,
        "rotary-base": 500000.0,
        "weight-decay": 0.1,
    },
    {
        "name": "long",
        "train-samples": 9,
        "lr": 0.002,
        "min-lr": 0.001,
        "lr-decay-style": "WSD",
        "lr-wsd-decay-style": "minus_sqrt",
        "lr-wsd-decay-samples": 8,
        "seq-length": 96,
        "position-embedding-type": "yarn",
        "rotary-scaling-factor": 3.0,
        "yarn-original-max-position-embeddings": 32,
    },
]
BOUNDARY = 2
"""Last iteration of the first stage."""
INSIDE = 4
"""An iteration of the second stage."""
LAST = 7
"""The last iteration."""
KILLS = (8, 24)
"""Samples before the micro-batches of the kills, in the first and the third step of `mid`."""
RECORD = "samples.jsonl"
LAYOUTS: dict[str, Settings] = {
    "pp2": {"pipeline_model_parallel_size": 2, "zero_stage": 1},
    "dp2-zero2": {"zero_stage": 2},
    "tp2-zero3": {"tensor_model_parallel_size": 2, "zero_stage": 3},
}


def printed_tokens(run: Path, last: int) -> dict[int, list[int]]:
    """The tokens of the documents that tools/data_usage.py prints for all steps, by sample."""
    data = RunData(run, trusts_files=True, trusts_code=False)
    samples = dict[int, list[int]]()
    for step in range(1, last + 1):
        steps = data.of_step(step)
        for position in steps.samples(step):
            parts = documents_of(steps, position)
            samples[position] = [token for part in parts for token in part.ids]
    return samples


def recorded_tokens(run: Path) -> dict[int, list[int]]:
    """The tokens of the samples that the model of a run has read."""
    lines = map(json.loads, (run / RECORD).read_text().splitlines())
    return {first + index: row for first, _, rows in lines for index, row in enumerate(rows)}


@pytest.fixture(scope="module")
def staged(base: Settings, corpus: Path, tmp_path_factory: Factory) -> Settings:
    """Settings of a run with three stages, the second of which has a blend.

    Tokens attend to their document alone, which ends where the .idx file ends it.
    """
    folder = tmp_path_factory.mktemp("stages")
    other = write_corpus(folder / "other", 100, seed=1, step=-1)
    blend = {"data-path": ["0.3", str(corpus), "0.7", str(other)]}
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({"stages": [STAGES[0], STAGES[1] | blend, STAGES[2]]}))
    documents = {"reset_attention_mask": True, "document_boundaries": "idx"}
    settings = {**base, **documents, "global_batch_size": 4, "save_interval": 1}
    return {**settings, "position_embedding_type": "rope", "attention_dropout": 0.0, "config": path}


@pytest.fixture(scope="module")
def uninterrupted(launcher: Launcher, staged: Settings, tmp_path_factory: Factory) -> Path:
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("full")
    run = {**staged, "save": folder}
    recording = {"fault": "micro-batch:0:record", "environment": {"RECORD": str(folder / RECORD)}}
    output = launcher.start(run, ranks=1, **recording).succeed()
    assert "stage mid: iterations 3 to 5" in output
    return folder


def test_stages_killed_and_resumed_equal_an_uninterrupted_run(
    launcher: Launcher, staged: Settings, uninterrupted: Path, tmp_path: Path
) -> None:
    """Claim (schedules): a run whose stages differ in blend, learning rate, sequence length, batch
    size, rotary positions and weight decay, killed at the start of a stage and inside of one and
    resumed, equals an uninterrupted one bit for bit"""
    run = {**staged, "save": tmp_path, "load": tmp_path}
    for kill, saved in zip(KILLS, (BOUNDARY, INSIDE), strict=True):
        killed = launcher.start(run, ranks=1, fault=f"micro-batch:{kill}:kill-all").wait()
        assert set(killed.codes) == {-9}
        assert steps(tmp_path)[-1]["iteration"] == saved
    launcher.start(run, ranks=1).succeed()
    expected = steps(uninterrupted)
    assert steps(tmp_path) == expected
    checkpoints = (folder / f"global_step{LAST}" for folder in (uninterrupted, tmp_path))
    assert not checkpoint_differences(*checkpoints)
    text = (tmp_path / "events.jsonl").read_text()
    events = [event for event in map(json.loads, text.splitlines()) if event["event"] == "stage"]
    assert [(event["iteration"], event["text"].split(":")[0]) for event in events] == [
        (BOUNDARY, "mid"),
        (BOUNDARY, "mid"),
        (5, "long"),
    ]
    for key, values in {
        "global_batch_size": [4, 4, 8, 8, 8, 4, 4],
        "curriculum_seqlen": [32, 32, 64, 64, 64, 96, 96],
        "weight_decay": [0.01, 0.01, 0.1, 0.1, 0.1, 0.01, 0.01],
    }.items():
        assert [record[key] for record in expected] == values
    for folder in (uninterrupted, tmp_path):
        usage = json.loads((folder / "data_usage.json").read_text())
        counts = {(item["stage"], Path(item["prefix"]).name): item["samples"] for item in usage}
        assert counts == {
            ("stable", "tokens"): 8,
            ("mid", "tokens"): 15,
            ("mid", "other"): 17,
            ("long", "tokens"): 23,
        }
        # The documents that the tool prints are those that the uninterrupted run has read.
        assert printed_tokens(folder, LAST) == recorded_tokens(uninterrupted)


@pytest.mark.parametrize(
    "name", ["pp2", *(pytest.param(name, marks=pytest.mark.proof) for name in list(LAYOUTS)[1:])]
)
def test_stages_continue_on_other_layouts_with_the_same_curve(
    name: str, launcher: Launcher, staged: Settings, uninterrupted: Path, tmp_path: Path
) -> None:
    """Claim (schedules): and its stages continue on other layouts with the same curve"""
    settings = {**staged, **LAYOUTS[name], "load": uninterrupted, "ckpt_step": BOUNDARY}
    launcher.start({**settings, "save": tmp_path}, ranks=2).succeed()
    assert printed_tokens(tmp_path, LAST) == recorded_tokens(uninterrupted)
    for ours, theirs in zip(steps(tmp_path), steps(uninterrupted)[BOUNDARY:], strict=True):
        assert ours == {
            key: value if value is None else pytest.approx(value, rel=1e-5)
            for key, value in theirs.items()
        }
