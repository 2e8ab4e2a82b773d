"""Attention of context-parallel ranks equals that of one process, with all gradients.

Every rule, for numbers of heads that the ranks do not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.model.attention.context import ContextAttention
from megatron_ds.model.attention.masks import alibi_slopes
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.parallel.context.exchange import EXCHANGES
from megatron_ds.parallel.context.layout import CHUNKS, chunks_of
from megatron_ds.parallel.mesh import Group
from tests.dist.rank_jobs import selected
from tests.distributed import run_ranks

TEXTS = 2
SIZE = 8
Name = tuple[str, str]
"""Case and kind of exchange."""


@dataclass(frozen=True)
class Case:
    """Attention of some ranks."""

    ranks: int = 4
    heads: int = 7
    kv_heads: int = 7
    value_size: int = SIZE
    tokens: int = 32
    rule: AttentionRule = field(default_factory=AttentionRule)
    lengths: tuple[int, ...] = ()
    """Tokens of the documents of a text."""
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "two ranks": Case(ranks=2, tokens=20),
    "three ranks": Case(ranks=3, tokens=24),
    "28 heads": Case(heads=28, kv_heads=4),
    "fewer key-value heads than ranks": Case(heads=6, kv_heads=2),
    "one head": Case(heads=1, kv_heads=1),
    "one token in a chunk": Case(tokens=8),
    "half precision": Case(dtype=torch.bfloat16),
    "smaller values": Case(value_size=5),
    "scale": Case(rule=AttentionRule(scale=0.2)),
    "window of less than a chunk": Case(rule=AttentionRule(window=3)),
    "window of one token": Case(rule=AttentionRule(window=1)),
    "window of several chunks": Case(kv_heads=1, rule=AttentionRule(window=11)),
    "ALiBi": Case(rule=AttentionRule(alibi=True)),
    "soft cap": Case(rule=AttentionRule(softcap=1.5)),
    "sinks": Case(rule=AttentionRule(sinks=True)),
    "all": Case(
        heads=6,
        kv_heads=2,
        rule=AttentionRule(None, True, 9, 0.4, 2.0, True),
        lengths=(5, 1, 12, 14),
    ),
    "documents of one token": Case(lengths=(1,) * 32),
    "a document over all ranks": Case(lengths=(32,)),
    "documents": Case(kv_heads=1, lengths=(1, 9, 3, 19)),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 0.02}


@dataclass(frozen=True)
class Inputs:
    """Complete sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    """Gradient of the attention."""
    sinks_n: Tensor
    documents_BS: Tensor | None

    @classmethod
    def of(cls, case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(case.heads + case.tokens)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(case.dtype)

        text = TEXTS, case.heads, case.tokens
        documents_BS = None
        if case.lengths:
            ids = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths))
            documents_BS = torch.stack([ids, (ids.max() - ids).flip(0)]).int()
        return cls(
            draw(*text, SIZE),
            draw(TEXTS, case.kv_heads, case.tokens, SIZE),
            draw(TEXTS, case.kv_heads, case.tokens, case.value_size),
            draw(*text, case.value_size),
            draw(case.heads),
            documents_BS,
        )


def local(x: Tensor, group: Group) -> Tensor:
    """This rank's chunks of [B, n, S, D]."""
    chunks = x.chunk(CHUNKS * group.size, dim=2)
    return torch.cat([chunks[chunk] for chunk in chunks_of(group.rank, group.size)], dim=2)


def complete(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `local`, of all ranks."""
    chunks: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        chunks |= zip(chunks_of(rank, len(parts)), part.chunk(CHUNKS, dim=2), strict=True)
    return torch.cat([chunks[number] for number in sorted(chunks)], dim=2)


def attend_on_rank(rank: int, ranks: int, names: list[Name]) -> dict[Name, Any]:
    """Attention and gradients of this rank, by case and kind of exchange."""
    group = Group(tuple(range(ranks)), rank, dist.group.WORLD)
    found = {}
    for name, kind in names:
        case = CASES[name]
        inputs = Inputs.of(case)
        slopes_n = torch.tensor(alibi_slopes(case.heads))
        core = ContextAttention(case.rule, group, kind, slopes_n, inputs.documents_BS)
        leaves = [local(x, group).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        if case.rule.sinks:
            leaves.append(inputs.sinks_n.clone().requires_grad_())
        q, k, v, *sinks_n = leaves
        attended = core.attend(q, k, v, 0.0, *sinks_n)
        attended.backward(local(inputs.grad, group))
        found[name, kind] = [attended.detach(), *(leaf.grad for leaf in leaves)]
    return found


def attend_alone(case: Case) -> list[Tensor]:
    """Attention of one process in fp64, and its gradients."""
    inputs = Inputs.of(case)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.sinks_n)]
    q, k, v, sinks_n = leaves
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (case.rule.scale or SIZE**-0.5)
    if case.rule.softcap is not None:
        scores = case.rule.softcap * torch.tanh(scores / case.rule.softcap)
    positions = torch.arange(case.tokens)
    distance = positions - positions[:, None]
    if case.rule.alibi:
        scores = scores + torch.tensor(alibi_slopes(case.heads))[:, None, None] * distance
    hidden = distance > 0
    if case.rule.window is not None:
        hidden = hidden | (distance <= -case.rule.window)
    if (ids := inputs.documents_BS) is not None:
        hidden = (hidden | (ids[:, None] != ids[..., None])).unsqueeze(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if case.rule.sinks:
        column = sinks_n[:, None, None].expand(TEXTS, -1, case.tokens, 1)
        scores = torch.cat([scores, column], dim=-1)
    attended = scores.softmax(-1)[..., : case.tokens] @ v
    attended.backward(inputs.grad.double())
    used = leaves if case.rule.sinks else leaves[:3]
    return [attended.detach(), *(leaf.grad for leaf in used if leaf.grad is not None)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Name, list[list[Tensor]]]:
    """What each rank computed in the selected cases."""
    names: dict[int, list[Name]] = {}
    for _, params in selected(request):
        name = params["name"], params["kind"]
        names.setdefault(CASES[name[0]].ranks, []).append(name)
    found: dict[Name, list[list[Tensor]]] = {}
    for ranks, chosen in names.items():
        by_rank = run_ranks(attend_on_rank, ranks, ranks, chosen)
        found |= {name: [result[name] for result in by_rank] for name in chosen}
    return found


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_one_process(
    name: str, kind: str, results: dict[Name, list[list[Tensor]]]
) -> None:
    """Claim (parallel): attention of context-parallel ranks and its gradients equal those of one
    process, for any number of heads and each kind of exchange, with grouped queries, windows,
    document masks, ALiBi, soft caps and sinks"""
    case = CASES[name]
    ranks = results[name, kind]
    references = attend_alone(case)
    labels = ["attention", "queries", "keys", "values", "sinks"]
    for number, (label, reference) in enumerate(zip(labels, references, strict=False)):
        parts = [rank[number] for rank in ranks]
        found = torch.stack(parts).sum(0) if label == "sinks" else complete(parts)
        # With a window of one token, queries and keys have no gradients.
        error = (found.double() - reference).abs().max() / reference.abs().max().clamp(min=1)
        assert error < TOLERANCES[case.dtype], label
