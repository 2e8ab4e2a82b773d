"""The documents that tools/data_usage.py names are those that the steps of a run have read."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.data.token_files.token_file_stats import document
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.run_phases import RunPhases
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.train_state import StepResult, TrainState
from megatron_ds.training.loggers.events import EventLog
from megatron_ds.training.run import complete_settings
from megatron_ds.training.start.data_length import open_data
from megatron_ds.training.start.preflight import RunInputs
from megatron_ds.training.start.run_data import build_phase_data
from megatron_ds.usage.command import main
from megatron_ds.usage.documents import documents_of
from megatron_ds.usage.run_data import RunData
from tests.problems import printed_codes

FLAGS = [
    *shlex.split(
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 "
        "--micro-batch-size 2 --global-batch-size 8 --tokenizer-type NullTokenizer --fp16 "
        "--vocab-size 60000 --eval-iters 0 --split 1,0,0 --position-embedding-type rope "
        "--max-position-embeddings 24 --lr-decay-style constant --stages"
    ),
    "{name: one, train-samples: 60, data-path: a, rampup-batch-size: [4, 4, 24]}",
    "{name: two, train-iters: 6, seq-length: 24, curriculum-seqlen: [8, 24, 4], "
    "data-path: [0.3, a, 0.7, b]}",
]
RUN = ("child", "--trust-recorded-files")
KEYS = "step", "position", "dp_rank", "epoch", "first", "tokens"
Read = dict[int, dict[int, tuple[int, list[int]]]]
"""Step -> position -> the data-parallel rank that has read the sample, and its tokens."""


def write(prefix: Path, first: int, documents: int, sequences: int = 1) -> None:
    """Documents of one or more sequences; each token occurs once."""
    draw = np.random.default_rng(first)
    with pair_writer(prefix, "uint16") as writer:
        for _ in range(documents):
            sizes = draw.integers(1, 30 // sequences, sequences).tolist()
            writer.add_documents(np.arange(first, first + sum(sizes)), sizes, [sequences])
            first += sum(sizes)


class FakeRun:
    """A run on data alone, which reads as a trainer does.

    Args:
        folder: For --save.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.state = TrainState()
        self.history = None

    def train(self, until: int, ranks: int = 1, *flags: str, clock: float = 0.0) -> Read:
        """Starts the run, or continues it, and returns what it has read."""
        plans: list[LoadPlan] = []

        def complete(*arguments: Any) -> Any:
            config, plan, problems = complete_settings(*arguments)
            plans.append(plan)
            return config, problems

        config, problems = build_config(
            [*FLAGS, *flags], world_size=ranks, warn=lambda _: None, complete=complete
        )
        assert problems == []
        files = tuple(open_data(stage.data) for stage in config.phase_configs)
        inputs = RunInputs(plans[0], NullTokenizer(60000), files)
        phases = RunPhases(config, config.parallel.data_parallel_size(ranks))
        state = phases.entered(self.state)
        history = self.history
        data = None if history is None else history.to_dict()
        events = EventLog(clock=lambda: clock)
        path = config.data.exclude_documents
        text = path and Path(path).read_text()
        position = {"ranks": ranks, "state": state.to_dict(), "data": data, "excluded": text}
        events.start(self.folder, config, state.iteration, **position)
        built = None
        read = defaultdict[int, Any](dict)
        stage = -1
        while state.iteration < until:
            state = phases.entered(state)
            if stage != state.stage:
                if built is not None:
                    history = built.progress.history_after(state.consumed_samples)
                built = build_phase_data(config, inputs, phases.dp_size, state, history)
                stage = state.stage
                batches = self.batches(phases, state, built.train)
            plan = phases.plan(state)
            for _ in range(plan.num_micro_batches):
                for rank, batch in enumerate(map(next, batches)):
                    ids = batch.samples.ids[:, : plan.seq_length + 1]
                    for index, row in enumerate(ids.tolist()):
                        read[plan.iteration][batch.position + index] = rank, row
            state = state.advance(plan, StepResult(1.0, None))
        self.state = state
        self.history = built.progress.history_after(state.consumed_samples)
        with (self.folder / "metrics.jsonl").open("a") as file:
            for step in read:
                file.write(json.dumps({"iteration": step, "lm_loss": 1.0}) + "\n")
        return read

    @staticmethod
    def batches(phases: RunPhases, state: TrainState, dataset: Any) -> list[MicroBatchIterator]:
        size = phases.dp_size
        config = phases.at(state)
        return [
            MicroBatchIterator(
                dataset,
                consumed=state.consumed_samples,
                micro_batch_size=config.schedule.micro_batch_size,
                dp_rank=rank,
                dp_size=size,
            )
            for rank in range(size)
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Read]:
    """A run that another one continues twice, each time on another layout, and what they read."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "a", 0, 60)
    write(folder / "b", 2000, 50, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        parent = FakeRun(folder / "parent")
        read = parent.train(3, clock=0)
        checkpoint = parent.state, parent.history
        read |= parent.train(5, clock=1)
        child = FakeRun(folder / "child")
        child.state = parent.state
        child.history = parent.history
        layout = "--tensor-model-parallel-size", "2", "--load", "parent", "--micro-batch-size", "1"
        read |= child.train(11, 4, *layout, clock=2)
        parent.state, parent.history = checkpoint  # goes on with other samples
        parent.train(6, 1, "--seed", "5", clock=3)
        (folder / "out.txt").write_text("a:3\nb:11-14")
        flags = "--pipeline-model-parallel-size", "2", "--exclude-documents", "out.txt"
        read |= child.train(14, 4, *flags, clock=4)
        (folder / "out.txt").write_text("a:5")  # as for the next resume
    return folder, read


def test_the_documents_of_each_step_are_those_that_it_has_read(
    runs: tuple[Path, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (samples): `tools/data_usage.py` names the documents that each step of a run has read,
    over blends, stages, batch ramp-ups, curricula, resumes, layouts and the runs that it continues
    """
    folder, read = runs
    monkeypatch.chdir(folder)
    run = RunData(folder / "child", trusts_files=True, trusts_code=False)
    assert sorted(read) == list(range(1, 15))
    for step, samples in read.items():
        steps = run.of_step(step)
        assert list(steps.samples(step)) == sorted(samples)
        for position, (rank, row) in samples.items():
            parts = documents_of(steps, position)
            assert [token for part in parts for token in part.ids] == row
            assert steps.dp_rank(position) == rank


def test_the_steps_of_each_document_are_the_inverse(
    runs: tuple[Path, Read], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim (samples): and the steps, samples and epochs that have read a document"""
    folder, read = runs
    monkeypatch.chdir(folder)
    for name, number in (("a", 7), ("b", 0), ("b", 49)):
        tokens = document(IndexedDataset(name), number).tolist()
        expected = []
        seen = Counter[tuple[int, bool]]()
        rows = ((step, *item) for step, samples in read.items() for item in sorted(samples.items()))
        for step, position, (rank, row) in rows:
            for part in runs_of(tokens, row):
                first = part[0]
                is_input = part[0] in row[:-1]
                entry = (
                    step,
                    position,
                    rank,
                    1 + seen[first, is_input],
                    tokens.index(first),
                    len(part),
                )
                expected.append(dict(zip(KEYS, entry, strict=True)))
            seen.update((token, True) for token in row[:-1])
            seen.update((token, False) for token in row[1:])
        assert main([*RUN, "--document", f"{name}:{number}", "--json"]) == os.EX_OK
        assert json.loads(capsys.readouterr().out)["reads"] == expected
        assert len(expected) > 1


def runs_of(tokens: list[int], row: list[int]) -> list[list[int]]:
    """The parts of a sample that are consecutive tokens of a document."""
    parts: list[list[int]] = []
    for token in (one for one in row if one in tokens):
        if parts and token == parts[-1][-1] + 1:
            parts[-1].append(token)
        else:
            parts.append([token])
    return parts


def test_what_is_not_known_is_an_error(
    runs: tuple[Path, Read], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs[0])
    for words, code in (
        ("--step 500", "step-without-start"),
        ("--step 6 --rank 4", "rank-beyond-run"),
        ("--rank 1", "step-or-document"),
        ("--document a", "document-syntax"),
        ("--document c:1", "document-of-no-file"),
        ("--document a:60", "document-beyond-file"),
        ("--document a:1 --rank 0", "rank-without-step"),
    ):
        assert main([*RUN, *words.split()]) in (ExitCode.ERROR, ExitCode.BAD_SETTINGS)
        assert code in printed_codes(capsys.readouterr().err)
    assert main(["child", "--step", "7"]) == ExitCode.ERROR
    assert printed_codes(capsys.readouterr().err) == ["recorded-files-not-trusted"]
    assert main([*RUN, "--step", "7", "--rank", "1"]) == os.EX_OK
    text = capsys.readouterr().out
    assert text.count("--- sample") == 4
    assert "a:" in text
