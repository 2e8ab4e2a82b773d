"""Ranks that share every sequence (DeepSpeed-Ulysses) train like one process.

`test_layouts.py` has every pair with other options. Here are the kinds of document masks, fewer
key-value heads than ranks, four ranks, and loss masks of which the ranks have unequal shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config import ParallelConfig
from megatron_ds.model.attention.cores import EagerAttention, UlyssesAttention
from megatron_ds.model.attention.masks import ragged_bias
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.parallel.ulysses import gather_heads, gather_sequence
from tests.dist import parity_cases
from tests.dist.compare import differences, differing_bits
from tests.dist.engine_harness import Meshes, train
from tests.dist.parity_cases import SAMPLES, Case, config_of, plans_of, train_alone
from tests.dist.rank_jobs import (
    JobResults,
    Jobs,
    case_training,
    run_by_world,
    selected,
    training,
)
from tests.dist.reference import Run, train_reference
from tests.proofs.cases import with_proofs

FULL = {"recompute": {"recompute_granularity": "full"}}
MASKED = {"data": {"eod_mask_loss": True}}
DOCUMENTS = {"data": {"reset_position_ids": True, "reset_attention_mask": True}}
POSITIONS = {
    "data": {"reset_position_ids": True, "eod_mask_loss": True},
    "optimizer": {"calculate_per_token_loss": True},
}
LAYOUTS = {
    "zero1": Case(2, 1, 1, 1, "rope", "sgd", sp=2),
    "zero1 masked loss": Case(2, 1, 1, 2, "learned", "adamw", MASKED, sp=2, ends=0.2),
    "zero2 alibi": Case(2, 2, 1, 2, "alibi", "adamw", FULL, sp=2),
    "zero2 documents": Case(2, 2, 1, 1, "learned", "sgd", DOCUMENTS, sp=2, ends=0.2),
    "zero3 gqa": Case(2, 3, 1, 1, "gqa", "adamw", sp=2),
    "zero3 documents": Case(2, 3, 1, 2, "window", "adamw", POSITIONS, sp=2, ends=0.2),
    "zero3 four gqa": Case(4, 3, 1, 1, "gqa", "adamw", sp=4),
}
PROOFS = ("zero2 documents", "zero3 gqa")
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
SEEDED = {"model": DROPOUT, "runtime": {"seed": parity_cases.SEED}}
DROPPING = Case(2, 1, 1, 1, "learned", "sgd", SEEDED, sp=2)
HALF_MASKED = Case(2, 1, 1, 2, "learned", "adamw", MASKED, sp=2)


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


def train_recording_masks(meshes: Meshes) -> tuple[Run, list[Tensor]]:
    masks: list[Tensor] = []

    def draw(x: Tensor, p: float) -> Tensor:
        masks.append(torch.rand_like(x) >= p)
        return masks[-1]

    with dropout_by(draw):
        run = train(config_of(DROPPING), plans_of(DROPPING)[:1], SAMPLES, None, meshes)
    return run, masks


def exchange_heads(meshes: Meshes) -> list[Tensor]:
    """Queries, keys, values and attended values of all heads, exchanged and back; attention with
    sinks."""
    group = meshes.of(ParallelConfig(ds_sequence_parallel_size=2)).ulysses
    own = slice(3 * group.rank, 3 * group.rank + 3)
    parts = [part[:, :, own] for part in PARTS]
    q, k, v = gather_sequence(*parts, group)
    attended = UlyssesAttention(core_with_sinks(), group).attend(*parts, 0.0, SINKS)
    return [q, k, v, gather_heads(torch.cat([v, 2 * v], dim=1), group), attended]


def core_with_sinks() -> EagerAttention:
    bias = ragged_bias(torch.arange(6)[None], 6, torch.float32)
    return EagerAttention(bias, AttentionRule(sinks=True))


PARTS = [
    torch.randn(shape, generator=torch.Generator().manual_seed(number))
    for number, shape in enumerate([(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 3)])
]
"""Of all tokens: queries of four heads, keys and values of two, which are smaller."""
SINKS = torch.tensor([-1.0, 0.0, 1.0, 2.0])


def test_heads_of_keys_and_values_may_differ_in_size(outcomes: JobResults) -> None:
    halves = outcomes.of("heads")
    for number, part in enumerate(PARTS):
        received = torch.cat([half[number] for half in halves], dim=1)
        assert torch.equal(received, part)
    attended = torch.cat([half[3] for half in halves], dim=2)
    each = PARTS[2].unsqueeze(2)
    assert torch.equal(attended, torch.cat([each, 2 * each], dim=2).flatten(1, 2))
    attended = torch.cat([half[4] for half in halves], dim=2)
    torch.testing.assert_close(attended, core_with_sinks().attend(*PARTS, 0.0, SINKS))


OTHER_JOBS = {
    "test_heads_of_keys_and_values_may_differ_in_size": ("heads",),
    "test_dropout_equals_one_process_with_the_same_masks": ("recorded",),
    "test_recomputation_drops_what_was_dropped": ("dropout", "dropout full"),
    "test_a_rank_may_have_no_counted_token": ("half masked",),
}
"""The jobs of tests that are not of one layout."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    """The jobs of the selected tests, on one set of two ranks and one of four."""
    jobs = Jobs((name, case_training(case)) for name, case in LAYOUTS.items())
    jobs |= {
        "heads": exchange_heads,
        "recorded": train_recording_masks,
        "dropout": case_training(DROPPING),
        "dropout full": case_training(DROPPING, **FULL),
        "half masked": training(
            config_of(HALF_MASKED), plans_of(HALF_MASKED), SAMPLES.with_masked_half()
        ),
    }
    needed: dict[int, Jobs] = {}
    for test, params in selected(request):
        for name in OTHER_JOBS.get(test) or (params["name"],):
            world = LAYOUTS[name].world if name in LAYOUTS else 2
            needed.setdefault(world, Jobs()).setdefault(name, jobs[name])
    return run_by_world(needed)


@pytest.mark.parametrize(
    "name",
    [pytest.param("zero1", marks=pytest.mark.smoke), *with_proofs(list(LAYOUTS)[1:], PROOFS)],
)
def test_shared_sequences_train_like_one_process(name: str, outcomes: JobResults) -> None:
    """Claim (parallel): ranks that share every sequence (DeepSpeed-Ulysses) train like one process,
    also with fewer key-value heads than ranks, with unequal loss masks, and together with
    `--sequence-parallel`"""
    assert outcomes.differences(name, train_alone(LAYOUTS[name])) == []


def test_a_rank_may_have_no_counted_token(outcomes: JobResults) -> None:
    """All masked tokens are in the slice of one rank, which has the full mean and gradient."""
    config = config_of(HALF_MASKED)
    samples = SAMPLES.with_masked_half()
    size = config.schedule.micro_batch_size
    reference = train_reference(config, samples, plans_of(HALF_MASKED), size)
    assert reference.losses[0] > 1.0
    assert outcomes.differences("half masked", reference) == []


def test_dropout_equals_one_process_with_the_same_masks(outcomes: JobResults) -> None:
    """Claim (parallel): and so they do with dropout, given the same masks"""
    (run, masks), (_, others) = outcomes.of("recorded")
    # Hidden states [S, B, H] are sliced by the sequence, attention weights [B, n, S, S] by heads.
    recorded = iter(
        torch.cat(pair, dim=0 if pair[0].dim() == 3 else 1)
        for pair in zip(masks, others, strict=True)
    )
    assert all(not torch.equal(mask, other) for mask, other in zip(masks, others, strict=True))

    with dropout_by(lambda x, p: next(recorded)):
        reference = train_reference(config_of(DROPPING), SAMPLES, plans_of(DROPPING)[:1])
    assert next(recorded, None) is None
    assert differences(run, reference) == []


def test_recomputation_drops_what_was_dropped(outcomes: JobResults) -> None:
    pairs = zip(outcomes.of("dropout"), outcomes.of("dropout full"), strict=True)
    for stored, recomputed in pairs:
        assert differing_bits(recomputed, stored) == []
