"""Decoding on devices: what a step copies, and its graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ds.inference.generate import continue_prompts
from megatron_ds.inference.generation import engine as engine_module
from megatron_ds.inference.generation import kv_cache
from megatron_ds.inference.generation.decoding import Decoder
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.kv_cache import PreallocatedCache
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig, TextSequence
from megatron_ds.model.attention import cores as attention_cores
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel import embedding
from tests.fake_accelerator import graphs
from tests.proofs.cases import rotated, with_proofs
from tests.unit.inference.models import EOD, KINDS, model_of

SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=3)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_module, kv_cache, attention_cores, embedding):
        monkeypatch.setattr(module, "is_host", lambda kind: False)


def with_graphs(monkeypatch: pytest.MonkeyPatch, record: Callable[..., Any]) -> None:
    module = SimpleNamespace(
        make_graphed_callables=record, graph_pool_handle=graphs.graph_pool_handle
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


def texts_of(model: GPTModel, use_graphs: bool, new_tokens: int) -> list[list[int]]:
    """Texts of prompts that join the batch one after another."""
    prompts = [[3, 1, 4, 1, 5], list(range(20)), [7], list(range(30, 42)), [8, 9]]
    engine = GenerationEngine(model, slots=3, capacity=150, use_graphs=use_graphs)
    sequences = [
        TextSequence.of(prompt, GenerationConfig(new_tokens - 9 * number, SAMPLED), number)
        for number, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
        engine.step()
    while engine.is_busy:
        engine.step()
    assert all(sequence.error is None for sequence in sequences)
    return [sequence.ids for sequence in sequences]


@pytest.mark.parametrize(
    ("kind", "window"),
    with_proofs(
        [("learned-gqa", None), ("rope-gqa", None), ("alibi", None), ("rope-gqa", "63,0")],
        [("rope-gqa", "63,0")],
    ),
)
def test_graphs_give_the_texts_of_the_layers(
    kind: str, window: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within and across numbers of texts and keys, of which each has one graph.

    Claim (serving): on devices, a token copies nothing larger than its activations, and graphs of
    its layers give the texts of the layers
    """
    sizes = {"max_position_embeddings": 150, "seq_length": 150}
    pattern = window and "2"
    model = model_of(kind, **sizes, window_size=window, window_attn_skip_freq=pattern)
    recorded: list[tuple[int, ...]] = []

    def record(layers: Any, static: tuple[Tensor, ...], pool: object) -> Callable[..., Tensor]:
        recorded.append((len(static[0]), layers.args[1]))
        return graphs.make_graphed_callables(layers, static, pool)

    expected = texts_of(model, False, 100)
    with_graphs(monkeypatch, record)
    calls = 0
    forward = model.forward

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += options.get("compute") == model._hidden
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts_of(model, True, 100) == expected
    assert len(recorded) == len(set(recorded))
    assert {texts for texts, _ in recorded} == {1, 2, 3}
    assert {keys for _, keys in recorded} == {64, 128}
    # Prompts, and the layers twice for each graph: to compare them and to record them.
    assert calls <= len(expected) + 2 * len(recorded)


def refuse(*args: Any, **options: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def record_wrongly(layers: Any, static: Any, pool: object) -> Callable[..., Tensor]:
    graph = graphs.make_graphed_callables(layers, static, pool)
    return lambda *args: graph(*args) * 1.1


@pytest.mark.parametrize("record", [refuse, record_wrongly, None])
def test_without_working_graphs_the_layers_are_computed(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("rope-gqa", seq_length=150)
    expected = texts_of(model, False, 50)
    with_graphs(monkeypatch, record)
    with pytest.warns(UserWarning, match="graph") as warned:
        assert texts_of(model, True, 50) == expected
    assert len(warned) == 1


def test_a_graph_must_not_read_values_or_take_them_from_the_host() -> None:
    """Of the graphs of these tests, as of a device's."""
    for function in (lambda x: x * x.sum().item(), lambda x: x + torch.tensor([1.0])):
        with pytest.raises(RuntimeError, match="not permitted in a graph"):
            graphs.make_graphed_callables(function, (torch.ones(1),))
    graph = graphs.make_graphed_callables(lambda x: (x + 1).view(2, 1).mul_(2), (torch.ones(2),))
    assert graph(torch.tensor([3.0, 4.0])).tolist() == [[8.0], [10.0]]


class Copies(TorchDispatchMode):
    """Bytes of the largest copy that is made inside, and its operation."""

    KINDS = ("clone", "copy_", "_to_copy", "cat", "repeat", "index", "index_select", "gather")

    def __init__(self) -> None:
        super().__init__()
        self.largest = (0, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_converted = name == "_to_copy" and args[0].dtype != result.dtype
        if name in self.KINDS and not is_converted:
            source = args[1] if name == "copy_" else result
            self.largest = max(self.largest, (source.nbytes, str(func)))
        return result


@pytest.mark.parametrize(
    ("kind", "lengths"), with_proofs(*rotated(KINDS, ([1500] * 8, list(range(1500, 1508)))))
)
def test_a_step_copies_nothing_larger_than_its_activations(
    kind: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And attention reads the memory of the cache.

    Claim (serving): on devices, a token copies nothing larger than its activations, and graphs of
    its layers give the texts of the layers
    """
    texts = 8
    hidden = 512
    length = 2048
    shape: dict[str, int] = {"hidden_size": hidden, "num_attention_heads": 8, "seq_length": length}
    shape |= {"ffn_hidden_size": 4 * hidden, "max_position_embeddings": length}
    model = model_of(kind, **shape, num_layers=1).to("meta", torch.bfloat16).requires_grad_(False)
    cache = PreallocatedCache(texts, length, next(model.parameters()))
    decoder = Decoder(model, cache, None)
    sequences = [TextSequence.of([1], GenerationConfig(1, SAMPLED), 0) for _ in range(texts)]
    read: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        read.extend(each.untyped_storage()._cdata for each in (k, v))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    cache.lengths[:] = lengths
    decoder.last_hidden(sequences)  # allocates the cache and tables
    read.clear()
    with Copies() as copies, torch.no_grad():
        model.logits(decoder.last_hidden(sequences))
    activations = 2 * texts * 4 * hidden
    assert copies.largest[0] <= activations, copies.largest
    assert read == [each.untyped_storage()._cdata for each in cache._buffers[0]]


def test_numbers_of_keys_are_few_and_not_much_larger() -> None:
    cache = PreallocatedCache(1, 8000, torch.empty(0))
    numbers = [cache.rounded(keys) for keys in range(1, 8001)]
    assert len(set(numbers)) <= 25
    for keys, rounded in enumerate(numbers, start=1):
        assert keys <= rounded < max(1.25 * keys, keys + 64)


def test_the_chosen_ids_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of the host are copied only when the texts of the batch change."""
    copied: list[Any] = []
    copy = engine_module.to_device

    def observed(numbers: Any, device: torch.device) -> Tensor:
        copied.append(numbers)
        return copy(numbers, device)

    monkeypatch.setattr("megatron_ds.inference.generation.decoding.to_device", observed)
    config = GenerationConfig(12, SamplingParams(greedy=True), EOD + 100)
    texts = continue_prompts(model_of("rope-gqa"), [[1, 2, 3], [4, 5]], config)
    assert copied == [[3, 5]]
    assert all(len(text.new_ids) == 12 for text in texts)
