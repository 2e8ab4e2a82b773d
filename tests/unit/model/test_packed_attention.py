"""Documents of a sample: where they are, and that each is to the model what it is alone.

Attention is held against a dense [S, S] mask made here from the definition, with the loop over
documents and with the blocks of flex attention. torch has no backward pass of flex attention on a
CPU: there its part is played by `dense_flex`, which asks the same functions of every score.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator

from megatron_ds.config import ModelConfig, RecomputeConfig
from megatron_ds.model.attention import describe_kernel
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.packed_attention import (
    BLOCK,
    DocumentFlexAttention,
    PackingOptions,
    PerDocumentSDPA,
    block_mask,
    find_documents,
    row_lengths,
    select_flex_attention,
)
from megatron_ds.model.position_embedding import (
    AttentionContext,
    alibi_bias,
    alibi_slopes,
    rope_table,
)
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.unit.model.dense import dense_flex

CPU = torch.device("cpu")
EOD = 0
ROWS = {
    "no end": [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5],
    "ends in the middle": [5, 6, 0, 8, 9, 5, 6, 0, 8, 9, 5],
    "end first": [0, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5],
    "end last": [5, 6, 7, 8, 9, 5, 0, 7, 8, 9, 0],
    "ends in a row": [5, 6, 0, 0, 0, 5, 6, 7, 0, 0, 5],
    "ends alone": [0] * 11,
}
TOKENS = torch.tensor(list(ROWS.values()))
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=TOKENS.shape[1],
    vocab_size=50,
    make_vocab_size_divisible_by=64,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.1,
)
POSITIONS = ("learned_absolute", "rope", "alibi", "none")


KERNELS = {"loop": None, "blocks": dense_flex}


def build(
    rules: PackingOptions | None, *, recompute: str | None = None, **options: Any
) -> GPTModel:
    config = dataclasses.replace(CONFIG, **options)
    assert list(config.problems(1)) == []
    mesh, rng = Mesh.single(), RngStreams(0)
    how = ActivationCheckpointing(RecomputeConfig(recompute_granularity=recompute), rng)
    return GPTModel(config, mesh=mesh, rng=rng, seed=3, recompute=how, documents=rules)


def cut(row: list[int]) -> list[list[int]]:
    """The documents of a row, each with its end."""
    found: list[list[int]] = [[]]
    for token in row:
        found[-1].append(token)
        if token == EOD:
            found.append([])
    return [document for document in found if document]


def gradients(model: GPTModel) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    model.zero_grad()
    return found


def test_numbers_and_places_are_those_of_the_cut_rows() -> None:
    numbers, places = find_documents(TOKENS, EOD)
    for row, tokens in enumerate(TOKENS.tolist()):
        cuts = cut(tokens)
        assert numbers[row].tolist() == [i for i, one in enumerate(cuts) for _ in one]
        assert places[row].tolist() == [place for one in cuts for place in range(len(one))]
        assert row_lengths(numbers)[row] == [len(one) for one in cuts]


@pytest.mark.parametrize(
    ("kernel", "recompute"), [("loop", None), ("loop", "selective"), ("blocks", "full")]
)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_document_has_the_losses_and_gradients_that_it_has_alone(
    position: str, kernel: str, recompute: str | None
) -> None:
    options: dict[str, Any] = {"position_embedding_type": position}
    if position == "rope":
        options |= {"num_query_groups": 2, "rotary_percent": 0.5}
    rules = PackingOptions(EOD, True, True, KERNELS[kernel])
    packed, alone = build(rules, recompute=recompute, **options), build(None, **options)
    labels = TOKENS.roll(-1, 1)

    losses = F.cross_entropy(packed(TOKENS).flatten(0, 1), labels.flatten(), reduction="none")
    packed(TOKENS, labels).mean().backward()

    expected = []
    for row, tokens in enumerate(TOKENS.tolist()):
        for document, follow in zip(
            cut(tokens),
            labels[row].split([len(one) for one in cut(tokens)]),
            strict=True,
        ):
            logits = alone(torch.tensor([document]))[0]
            expected.append(F.cross_entropy(logits, follow, reduction="none"))
            loss = alone(torch.tensor([document]), follow.unsqueeze(0)).mean()
            (loss * len(document) / TOKENS.numel()).backward()
    torch.testing.assert_close(losses, torch.cat(expected), rtol=1e-5, atol=1e-5)
    for (name, got), want in zip(gradients(packed).items(), gradients(alone).values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=name)


def by_hand(model: GPTModel, tokens: torch.Tensor, *, restart: bool, ends: bool) -> torch.Tensor:
    """Logits, with a dense mask and with positions from the definition."""
    rows = [cut(row) for row in tokens.tolist()]
    number = torch.tensor([[i for i, one in enumerate(row) for _ in one] for row in rows])
    place = torch.tensor([[p for one in row for p in range(len(one))] for row in rows])
    length = tokens.shape[1]
    at = place if restart else torch.arange(length).expand_as(tokens)
    x_SBH = model.embedding.word(tokens.t())
    config, rotation = model.config, None
    if model.embedding.position is not None:
        x_SBH = x_SBH + model.embedding.position.weight[at.t()]
    if config.position_embedding_type == "rope":
        cos, sin = rope_table(length, config.head_dim, config.rotary_base, CPU)
        rotation = cos[at.t(), 0], sin[at.t(), 0]
    seen = torch.ones(length, length).tril().bool()
    mask = seen.expand(len(tokens), 1, length, length)
    if ends:
        mask = mask & (number[:, None, :, None] == number[:, None, None, :])
    if config.position_embedding_type == "alibi":
        slope = alibi_bias(alibi_slopes(config.num_attention_heads), length, length, CPU)
        mask = slope.expand(len(tokens), -1, -1, -1).masked_fill(~mask, -torch.inf)
    for block in model.layers:
        x_SBH = block(x_SBH, AttentionContext(rotation, mask, is_causal=False))
    logits: torch.Tensor = model.head(
        model.final_norm(x_SBH), None, None, model.embedding.word.weight
    )
    return logits


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(("restart", "ends"), [(True, False), (False, True), (True, True)])
def test_each_flag_does_its_own_part(position: str, restart: bool, ends: bool) -> None:
    model = build(PackingOptions(EOD, restart, ends), position_embedding_type=position)
    with torch.no_grad():
        expected = by_hand(model, TOKENS, restart=restart, ends=ends)
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
        plain = build(None, position_embedding_type=position)(TOKENS)
    idle = restart and not ends and position in ("alibi", "none")
    assert torch.allclose(plain, expected, rtol=1e-3, atol=1e-4) == idle


def test_rows_without_an_end_are_as_ever() -> None:
    tokens = TOKENS[:1]
    torch.testing.assert_close(build(PackingOptions(EOD, True, True))(tokens), build(None)(tokens))


def test_a_cache_knows_no_bounds() -> None:
    """A generator's tokens are one document, whatever the model was trained with."""

    class Empty:
        length = 0

        def update(self, layer: int, k: Any, v: Any) -> Any:
            return k, v

    rules = PackingOptions(EOD, True, True)
    torch.testing.assert_close(build(rules)(TOKENS, cache=Empty()), build(None)(TOKENS))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_masks_of_dropout_are_drawn_again_for_every_document(recompute: str) -> None:
    results = []
    for way in (None, recompute, recompute):
        model = build(
            PackingOptions(EOD, True, True),
            recompute=way,
            attention_dropout=0.3,
            hidden_dropout=0.1,
        )
        model.layers[0].attention.rng.begin_step(5, 7, 0)
        loss = model(TOKENS, TOKENS).mean()
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(model)})
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


def test_dropout_falls_on_attention_inside_documents() -> None:
    model = build(PackingOptions(EOD, True, True), attention_dropout=0.3)
    losses = []
    for position in (7, 7, 8):
        model.layers[0].attention.rng.begin_step(5, position, 0)
        losses.append(model(TOKENS, TOKENS).loss_sum.item())
    assert losses[0] == losses[1] != losses[2]


def test_without_a_token_that_counts_the_loss_is_zero_and_so_is_every_gradient() -> None:
    model = build(PackingOptions(EOD, True, True))
    tokens = TOKENS[-1:]
    loss = model(tokens, tokens, (tokens != EOD).float()).mean()
    loss.backward()
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(model).values())


def some_numbers(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return (torch.rand(rows, length, generator=generator) < 0.01).cumsum(1, dtype=torch.int32)


@pytest.mark.parametrize("length", [1, 100, BLOCK, 3 * BLOCK, 4 * BLOCK + 5])
def test_blocks_are_those_that_torch_finds_from_all_scores(length: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    numbers = some_numbers(3, length)
    ours = block_mask(numbers)
    theirs = create_block_mask(ours.mask_mod, 3, None, length, length, device="cpu")
    assert ours.shape == theirs.shape
    for count, which in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        assert torch.equal(getattr(ours, count), getattr(theirs, count)), count
        assert torch.equal(getattr(ours, which), getattr(theirs, which)), which


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("groups", "alibi"), [(4, False), (2, True)])
def test_torchs_flex_attention_gives_what_the_loop_gives(groups: int, alibi: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    length = 2 * BLOCK + 9
    numbers = some_numbers(2, length)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, length, 16, generator=generator) for n in (4, groups, groups))
    slopes = alibi_slopes(4)
    bias = alibi_bias(slopes, length, length, CPU) if alibi else None
    loop = PerDocumentSDPA(row_lengths(numbers), bias)
    blocks = DocumentFlexAttention(flex_attention, numbers, torch.tensor(slopes) if alibi else None)
    torch.testing.assert_close(blocks.attend(q, k, v, 0.0), loop.attend(q, k, v, 0.0))


def find(flex: Any, **options: Any) -> tuple[Any, str]:
    config = dataclasses.replace(CONFIG, **options)
    return select_flex_attention(config, 2, 2, torch.float32, CPU, load=flex)


@pytest.mark.parametrize("position", POSITIONS)
def test_flex_attention_is_taken_where_it_agrees(position: str) -> None:
    assert find(lambda: dense_flex, position_embedding_type=position) == (dense_flex, "")


def test_flex_attention_is_left_where_it_fails_or_is_wrong() -> None:
    def broken() -> Any:
        raise RuntimeError("No triton here. Please install it.\nAt length.")

    def forgetful(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def lost(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return q * torch.nan

    assert find(broken) == (None, "flex_attention fails here: No triton here")
    for wrong in (forgetful, lost):
        flex, why = find(lambda: wrong)  # noqa: B023
        assert flex is None
        assert "is wrong by" in why
    assert find(lambda: dense_flex, attention_dropout=0.1)[0] is None


def test_a_cpu_says_why_it_takes_the_loop() -> None:
    flex, why = select_flex_attention(CONFIG, 2, 1, torch.float32, CPU)
    assert flex is None
    assert "does not support backward on CPU" in why


def test_what_computes_attention_is_told() -> None:
    def told(rules: PackingOptions | None) -> str:
        return describe_kernel(CONFIG, 2, 1, torch.float32, CPU, rules)

    assert told(None) == told(PackingOptions(EOD, True, False))
    assert "scaled_dot_product_attention: " in told(None)
    assert "per document" in told(PackingOptions(EOD, False, True))
    assert "flex_attention" in told(PackingOptions(EOD, False, True, dense_flex))


@pytest.mark.gpu
@pytest.mark.skipif(
    get_accelerator().device_name() == "cpu", reason="needs an accelerator other than the CPU"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", POSITIONS)
def test_an_accelerator_takes_flex_attention(position: str, dtype: torch.dtype) -> None:
    device = torch.device(get_accelerator().current_device_name())
    config = dataclasses.replace(
        CONFIG,
        hidden_size=256,
        num_query_groups=2,
        seq_length=5 * BLOCK + 3,
        position_embedding_type=position,
    )
    flex, why = select_flex_attention(config, 3, 1, dtype, device)
    assert flex is not None, why
