"""Packed samples: document boundaries, and the equality of packed and separate documents.

Attention is compared with a dense [S, S] mask made here from the definition, for all
implementations. torch has no backward pass of flex attention on a CPU, and no variable-length
attention: `dense_flex` and `dense_varlen` replace them and compute every score.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.config import ModelConfig
from megatron_ds.inference.generation.kv_cache import PreallocatedCache
from megatron_ds.model.attention.masks import (
    BLOCK,
    MaskTables,
    alibi_slopes,
    block_mask,
    score_bias,
)
from megatron_ds.model.attention.packed import (
    DocumentFlexAttention,
    FlexKernel,
    Keys,
    PackingOptions,
    PerDocumentSDPA,
    VarlenKernel,
    document_lengths,
    find_documents,
    sequence_starts,
)
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.model.gpt import GPTModel
from tests.dense_gpt import dense_logits
from tests.proofs.cases import rotated, with_proofs
from tests.unit.model.dense import (
    TINY,
    build_model,
    computed_by,
    dense_flex,
    dense_varlen,
    documents_of,
    gradients,
)

CPU = torch.device("cpu")
EOD = 0
ROWS = {
    "no end": [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5],
    "ends in the middle": [5, 6, 0, 8, 9, 5, 6, 0, 8, 9, 5],
    "end first": [0, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5],
    "end last": [5, 6, 7, 8, 9, 5, 0, 7, 8, 9, 0],
    "ends in a row": [5, 6, 0, 0, 0, 5, 6, 7, 0, 0, 5],
    "ends alone": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
}
TOKENS = torch.tensor(list(ROWS.values()))
SHAPE = {"seq_length": TOKENS.shape[1], "vocab_size": 50, "make_vocab_size_divisible_by": 64}
CONFIG = ModelConfig(**TINY, **SHAPE, init_method_std=0.1)
POSITIONS = ("learned_absolute", "rope", "alibi", "none")


def build(
    packing: Any, *, recompute: str | None = None, kernel: Any = None, **options: Any
) -> GPTModel:
    config = dataclasses.replace(CONFIG, **options)
    return build_model(config, recompute, packing=packing, attention=computed_by(kernel, config))


def compute(model: GPTModel, tokens_BS: torch.Tensor, *rest: torch.Tensor) -> Any:
    """A forward pass in which documents end with EOD."""
    return model(tokens_BS, *rest, documents=documents_of(model, tokens_BS, EOD))


def split(row: list[int]) -> list[list[int]]:
    """The documents of a row, each with its end token."""
    documents: list[list[int]] = [[]]
    for token in row:
        documents[-1].append(token)
        if token == EOD:
            documents.append([])
    return [document for document in documents if document]


@functools.cache
def of_separate_documents(
    options: tuple[tuple[str, Any], ...],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses of all tokens [tokens], and the gradients of their mean."""
    model = build(None, **dict(options))
    expected = []
    for tokens, labels in zip(TOKENS.tolist(), TOKENS.roll(-1, 1), strict=True):
        documents = split(tokens)
        followers = labels.split(list(map(len, documents)))
        for document, follow in zip(documents, followers, strict=True):
            logits = model(torch.tensor([document]))[0]
            expected.append(F.cross_entropy(logits, follow, reduction="none").detach())
            loss = model(torch.tensor([document]), follow.unsqueeze(0)).mean()
            (loss * len(document) / TOKENS.numel()).backward()
    return torch.cat(expected), gradients(model)


def test_documents_and_positions_are_those_of_the_split_rows() -> None:
    doc_ids, positions = find_documents(TOKENS == EOD)
    for row, tokens in enumerate(TOKENS.tolist()):
        documents = split(tokens)
        assert doc_ids[row].tolist() == [i for i, doc in enumerate(documents) for _ in doc]
        assert positions[row].tolist() == [at for doc in documents for at in range(len(doc))]
        assert document_lengths(doc_ids)[row] == [len(doc) for doc in documents]


KERNELS: tuple[tuple[Any, str | None, int | None], ...] = (
    (None, None, None),
    (None, "selective", 3),
    (FlexKernel(dense_flex), "full", None),
    (FlexKernel(dense_flex), None, 3),
    (VarlenKernel(dense_varlen), "selective", None),
    (VarlenKernel(partial(dense_varlen, window=3)), None, 3),
)
"""Kernel, what is recomputed, and the window."""


@pytest.mark.parametrize(("kernel_case", "position"), with_proofs(*rotated(KERNELS, POSITIONS)))
def test_packed_documents_have_the_losses_and_gradients_of_separate_ones(
    kernel_case: tuple[Any, str | None, int | None], position: str
) -> None:
    """Claim (samples): in packed samples every document has the losses and gradients that it has
    alone (`--reset-position-ids --reset-attention-mask`)"""
    kernel, recompute, window = kernel_case
    if isinstance(kernel, VarlenKernel) and position == "alibi":
        pytest.skip("variable-length attention has no bias")
    size = None if window is None else f"{window - 1},0"
    options: dict[str, Any] = {"position_embedding_type": position, "window_size": size}
    if position == "rope":
        options |= {"num_query_groups": 2, "rotary_percent": 0.5}
    packed = build(PackingOptions(True, True), recompute=recompute, kernel=kernel, **options)
    labels = TOKENS.roll(-1, 1)

    losses = F.cross_entropy(
        compute(packed, TOKENS).flatten(0, 1), labels.flatten(), reduction="none"
    )
    compute(packed, TOKENS, labels).mean().backward()

    expected, alone = of_separate_documents(tuple(options.items()))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert len(gradients(packed)) == len(list(packed.parameters()))
    for (name, got), want in zip(gradients(packed).items(), alone.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"position_embedding_type": "alibi"},
        {"position_embedding_type": "none", "window_size": "3,0"},
        {"position_embedding_type": "alibi", "window_size": "3,0"},
    ],
)
def test_masks_in_the_kernel_equal_their_bias(options: dict[str, Any]) -> None:
    """Also where positions restart, and for several lengths in turn."""
    calls: list[Any] = []

    def flex(*qkv: Any, **given: Any) -> Any:
        calls.append(given["block_mask"])
        return dense_flex(*qkv, **given)

    config = dataclasses.replace(CONFIG, num_query_groups=2, **options)
    attention = computed_by(FlexKernel(flex), config)
    packing = PackingOptions(True, False)
    model = build_model(config, packing=packing, attention=attention)
    plain = build_model(config)
    for tokens in (TOKENS, TOKENS, TOKENS[:, :7]):
        for each in (model, plain):
            compute(each, tokens, tokens.roll(-1, 1)).mean().backward()
    assert [*map(id, calls[:4])] == [id(calls[0])] * 4  # the mask is kept
    assert len(calls) == 6
    for name, want in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], want, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(("positions", "attention"), [(True, False), (False, True), (True, True)])
def test_each_flag_has_its_own_effect(position: str, positions: bool, attention: bool) -> None:
    model = build(PackingOptions(positions, attention), position_embedding_type=position)
    rows = [split(row) for row in TOKENS.tolist()]
    documents = torch.tensor([[i for i, one in enumerate(row) for _ in one] for row in rows])
    places = torch.tensor([[p for one in row for p in range(len(one))] for row in rows])
    with torch.no_grad():
        expected = dense_logits(
            model.config,
            dict(model.named_parameters()),
            TOKENS,
            documents_BS=documents if attention else None,
            positions_BS=places if positions else None,
        ).float()
        plain = build(None, position_embedding_type=position)(TOKENS)[..., :50]
        found = compute(model, TOKENS)[..., :50]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    no_effect = positions and not attention and position in ("alibi", "none")
    assert torch.allclose(plain, expected, rtol=1e-3, atol=1e-4) == no_effect


def test_generation_ignores_document_boundaries() -> None:
    """A generator's tokens are one document."""

    texts, length = TOKENS.shape
    cache = PreallocatedCache(texts, length, torch.empty(0))
    view = cache.view(0, [length] * texts)
    packed = build(PackingOptions(True, True))(TOKENS, cache=view)
    torch.testing.assert_close(packed, build(None)(TOKENS))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_draws_the_same_dropout_masks_per_document(recompute: str) -> None:
    results = []
    for granularity in (None, recompute, recompute):
        dropout = {"attention_dropout": 0.3, "hidden_dropout": 0.1}
        model = build(PackingOptions(True, True), recompute=granularity, **dropout)
        model.layers["0"].attention.rng.begin_step(5, 7, 0)
        loss = compute(model, TOKENS, TOKENS).mean()
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(model)})
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


def test_attention_dropout_acts_within_documents() -> None:
    model = build(PackingOptions(True, True), attention_dropout=0.3)
    losses = []
    for position in (7, 7, 8):
        model.layers["0"].attention.rng.begin_step(5, position, 0)
        losses.append(compute(model, TOKENS, TOKENS).loss_sum.item())
    assert losses[0] == losses[1] != losses[2]


def test_loss_and_gradients_are_zero_without_a_counted_token() -> None:
    model = build(PackingOptions(True, True))
    tokens = TOKENS[-1:]
    loss = compute(model, tokens, tokens, (tokens != EOD).float()).mean()
    loss.backward()
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(model).values())


@pytest.mark.parametrize("bound", [15, 16, 40, 70])
def test_sequence_starts_are_cumulative_lengths(bound: int) -> None:
    doc_ids, positions = find_documents(TOKENS == EOD)
    lengths = [length for row in document_lengths(doc_ids) for length in row]
    bound += len(lengths) - 15
    expected = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    expected += [TOKENS.numel()] * (bound - len(lengths))
    starts = sequence_starts(positions == 0, bound)
    assert starts.dtype == torch.int32
    assert starts.tolist() == expected


def test_host_does_not_wait_for_the_number_of_documents() -> None:
    """A meta tensor has no values: reading one on the host is an error."""
    ends = (TOKENS == EOD).to("meta")
    documents = PackingOptions(True, True).documents(ends, max_documents=40)
    kernel = VarlenKernel(dense_varlen)
    keys = Keys(ends.shape[1], torch.float32, CPU, True, documents)
    rule = AttentionRule()
    tables = MaskTables([])
    core: Any = kernel.core(rule, keys, tables)
    assert core.starts.shape == (48 + 1,)
    unbound = dataclasses.replace(
        keys, documents=dataclasses.replace(documents, max_documents=None)
    )
    with pytest.raises(RuntimeError):
        kernel.core(rule, unbound, tables)


def random_doc_ids(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return (torch.rand(rows, length, generator=generator) < 0.01).cumsum(1, dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 1, 90, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
@pytest.mark.parametrize("length", [1, 100, BLOCK, 3 * BLOCK, 4 * BLOCK + 5])
def test_block_mask_equals_that_of_create_block_mask(length: int, window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    doc_ids = random_doc_ids(3, length)
    ours = block_mask(doc_ids, window)
    theirs = create_block_mask(ours.mask_mod, 3, None, length, length, device="cpu")
    assert ours.shape == theirs.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        for name in (f"{kind}_num_blocks", f"{kind}_indices"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("groups", "alibi"), [(4, False), (2, True)])
def test_flex_attention_equals_per_document_sdpa(groups: int, alibi: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    length = 2 * BLOCK + 9
    doc_ids = random_doc_ids(2, length)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, length, 16, generator=generator) for n in (4, groups, groups))
    slopes = alibi_slopes(4)
    bias = score_bias(slopes, length, CPU) if alibi else None
    loop = PerDocumentSDPA(document_lengths(doc_ids), bias)
    slopes_n = torch.tensor(slopes) if alibi else None
    blocks = DocumentFlexAttention(flex_attention, block_mask(doc_ids), slopes_n)
    torch.testing.assert_close(blocks.attend(q, k, v, 0.0), loop.attend(q, k, v, 0.0))
