"""Ranks that share every sequence (DeepSpeed-Ulysses) train like one process.

Among the cases, each ZeRO stage from 1 on, position embedding, accumulation and kind of document
mask occurs; with tensor parallelism; with fewer key-value heads than ranks; and with loss masks of
which the ranks have unequal shares. `test_layouts.py` has every pair with other options.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config import Config
from megatron_ds.model.packed_attention import FlexKernel, PackingOptions
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.engine_harness import Meshes, batches_of, build, full_weights, train
from tests.dist.parity_cases import Case, config_of, plans_of, reference_of
from tests.dist.rank_jobs import Job, JobResults, run_jobs, training
from tests.dist.reference import EOD, Run, train_reference
from tests.unit.model.dense import dense_flex

PACKED = parity_cases.SAMPLES.with_document_ends(0.2)
BOTH = (True, True)


@dataclass(frozen=True)
class Layout:
    """A parity case whose ranks share sequences."""

    case: Case
    """Its world size counts all ranks, its accumulation and tensor-parallel size are in effect."""
    size: int = 2
    """Sequence-parallel size."""
    documents: tuple[bool, bool] | None = None
    """Whether positions and attention end with a document; None: samples have no ends."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Changed fields by group."""
    sequence: bool = False
    """Whether the tensor-parallel ranks share the slices between the layers."""

    def config(self) -> Config:
        positions, attention = self.documents or (False, False)
        data = {"reset_position_ids": positions, "reset_attention_mask": attention}
        changes = {
            **self.changes,
            "parallel": {
                "ds_sequence_parallel_size": self.size,
                "sequence_parallel": self.sequence,
            },
            "schedule": {"micro_batch_size": self.case.micro_batch_size * self.size},
            "data": {**data, **self.changes.get("data", {})},
        }
        return config_of(self.case, **changes)

    @property
    def samples(self) -> Any:
        masks = self.changes.get("data", {}).get("eod_mask_loss", False)
        return PACKED if self.documents or masks else parity_cases.SAMPLES

    def job(self) -> Job:
        return training(self.config(), plans_of(self.case), self.samples)

    def reference(self) -> Run:
        if self.samples is parity_cases.SAMPLES:
            return reference_of(self.case.model, self.case.optimizer)
        kernel = FlexKernel(dense_flex)
        rules = None if self.documents is None else PackingOptions(EOD, *self.documents, kernel)
        config = self.config()
        # Without per-token loss, the loss is the mean over micro-batches of their means.
        micro = None if config.optimizer.calculate_per_token_loss else self.micro_batch_size
        return train_reference(config, self.samples, plans_of(self.case), rules, micro)

    @property
    def micro_batch_size(self) -> int:
        return self.case.micro_batch_size * self.size


FULL = {"recompute": {"recompute_granularity": "full"}}
PARTITIONED = {"recompute": {"recompute_granularity": "full", "partition_activations": True}}
MASKED: dict[str, dict[str, Any]] = {"data": {"eod_mask_loss": True}}
PER_TOKEN = MASKED | {"optimizer": {"calculate_per_token_loss": True}}
LAYOUTS = {
    "zero1": Layout(Case(2, 1, 1, 1, "rope", "sgd")),
    "zero1 masked loss": Layout(Case(2, 1, 1, 4, "learned", "adamw"), changes=MASKED),
    "zero1 per token": Layout(Case(2, 1, 1, 4, "rope", "sgd"), changes=PER_TOKEN),
    "zero2 alibi": Layout(Case(2, 2, 1, 4, "alibi", "adamw"), changes=FULL),
    "zero2 documents": Layout(Case(2, 2, 1, 1, "learned", "sgd"), documents=BOTH),
    "zero3 gqa": Layout(Case(2, 3, 1, 1, "gqa", "adamw")),
    "zero3 documents": Layout(
        Case(2, 3, 1, 4, "rope", "adamw"), documents=(True, False), changes=PER_TOKEN
    ),
    "zero1 tp": Layout(Case(4, 1, 2, 4, "swiglu", "adamw"), changes=PARTITIONED),
    "zero1 tp learned": Layout(Case(4, 1, 2, 1, "learned", "sgd"), sequence=True),
    "zero3 tp gqa": Layout(Case(4, 3, 2, 1, "gqa", "sgd"), changes=FULL, sequence=True),
    "zero2 tp alibi": Layout(Case(4, 2, 2, 1, "alibi", "sgd"), documents=(False, True)),
    "zero1 tp documents": Layout(
        Case(4, 1, 2, 4, "learned", "adamw"), documents=BOTH, sequence=True
    ),
    "zero3 four gqa": Layout(Case(4, 3, 1, 1, "gqa", "adamw"), size=4),
}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
SEEDED = {"runtime": {"seed": parity_cases.SEED}}


def dropout_layout(changes: dict[str, dict[str, Any]] | None = None) -> Layout:
    return Layout(
        Case(2, 1, 1, 1, "learned", "sgd"), changes={"model": DROPOUT, **SEEDED, **(changes or {})}
    )


@contextmanager
def dropout_by(mask_of: Callable[[Tensor, float], Tensor]) -> Iterator[None]:
    """Computes dropout, of the attention weights too, with these masks of what is kept."""
    length = parity_cases.SHAPE["seq_length"]
    future = torch.full((length, length), -torch.inf).triu(1)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        return x * mask_of(x, p) / (1 - p) if training else x

    def attention(
        q: Tensor, k: Tensor, v: Tensor, bias: None, p: float, causal: bool, **_: Any
    ) -> Tensor:
        assert causal
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + future).softmax(-1)
        return dropout(weights, p) @ v

    with (
        mock.patch.object(F, "dropout", dropout),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
    ):
        yield


def train_recording_masks(layout: Layout, meshes: Meshes) -> tuple[Run, list[Tensor]]:
    masks: list[Tensor] = []

    def draw(x: Tensor, p: float) -> Tensor:
        masks.append(torch.rand_like(x) >= p)
        return masks[-1]

    with dropout_by(draw):
        run = train(layout.config(), plans_of(layout.case)[:1], layout.samples, None, meshes)
    return run, masks


def resume_exactly(config: Config, case: Case, meshes: Meshes) -> tuple[list[Any], list[Any]]:
    """Losses, norms and final weights of steps after a save, and of the same steps resumed."""
    mesh = meshes.of(config.parallel)
    folder = [tempfile.mkdtemp() if mesh.rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    path, plans, results = Path(str(folder[0])), plans_of(case), []
    engine = build(config, mesh)
    batches = batches_of(config, mesh, parity_cases.SAMPLES)
    engine.train_step(batches, plans[0])
    engine.snapshot(copy=False).write(Path(path) / "saved")
    resumed = build(config, mesh)
    resumed.load(path, "saved")
    later = batches_of(config, mesh, parity_cases.SAMPLES, parity_cases.SAMPLES_PER_STEP)
    for each, source in ((engine, batches), (resumed, later)):
        seen: list[Any] = [each.train_step(source, plan) for plan in plans[1:]]
        seen = [(float(one.loss), float(one.grad_norm)) for one in seen]
        results.append([*seen, full_weights(each, mesh)])
    return results[0], results[1]


OTHER_JOBS = {
    "test_dropout_equals_one_process_with_the_same_masks": ("recorded",),
    "test_recomputation_drops_what_was_dropped": ("dropout", "dropout full"),
    "test_resumed_run_continues_bit_for_bit": ("resumed",),
}
"""The jobs of tests that are not of one layout."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[int, JobResults]:
    """The jobs of the selected tests, on one set of two ranks and one of four."""
    resumed = Layout(Case(2, 2, 1, 4, "rope", "adamw"), changes={"model": DROPOUT, **SEEDED})
    jobs = {name: layout.job() for name, layout in LAYOUTS.items()} | {
        "recorded": functools.partial(train_recording_masks, dropout_layout()),
        "dropout": dropout_layout().job(),
        "dropout full": dropout_layout(FULL).job(),
        "resumed": functools.partial(resume_exactly, resumed.config(), resumed.case),
    }
    selected: dict[int, dict[str, Job]] = {}
    for item in (item for item in request.session.items if item.path == request.path):
        names = OTHER_JOBS.get(item.name) or (item.callspec.params["name"],)
        for name in names:
            world = LAYOUTS[name].case.world if name in LAYOUTS else 2
            selected.setdefault(world, {})[name] = jobs[name]
    return {world: run_jobs(world, named) for world, named in selected.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.smoke] if n == "zero1" else []) for n in LAYOUTS]
)
def test_shared_sequences_train_like_one_process(
    name: str, outcomes: dict[int, JobResults]
) -> None:
    layout = LAYOUTS[name]
    reference = layout.reference()
    for rank, run in enumerate(outcomes[layout.case.world].of(name)):
        assert differences(run, reference) == [], f"rank {rank}"


def test_dropout_equals_one_process_with_the_same_masks(outcomes: dict[int, JobResults]) -> None:
    layout = dropout_layout()
    (run, masks), (_, others) = outcomes[2].of("recorded")
    # Hidden states [S, B, H] are sliced by the sequence, attention weights [B, n, S, S] by heads.
    recorded = iter(
        torch.cat(pair, dim=0 if pair[0].dim() == 3 else 1)
        for pair in zip(masks, others, strict=True)
    )
    assert all(not torch.equal(mask, other) for mask, other in zip(masks, others, strict=True))

    with dropout_by(lambda x, p: next(recorded)):
        reference = train_reference(layout.config(), layout.samples, plans_of(layout.case)[:1])
    assert next(recorded, None) is None
    assert differences(run, reference) == []


def test_recomputation_drops_what_was_dropped(outcomes: dict[int, JobResults]) -> None:
    pairs = zip(outcomes[2].of("dropout"), outcomes[2].of("dropout full"), strict=True)
    for stored, recomputed in pairs:
        assert recomputed.losses == stored.losses
        assert recomputed.norms == stored.norms


def test_resumed_run_continues_bit_for_bit(outcomes: dict[int, JobResults]) -> None:
    for (*continued, weights), (*resumed, loaded) in outcomes[2].of("resumed"):
        assert resumed == continued
        assert all(torch.equal(weights[name], loaded[name]) for name in weights)
