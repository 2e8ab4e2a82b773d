"""Checkpoints of other trainers, as their own programs wrote them and as damaged ones."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from megatron_ds.config.options.checkpoint import READ_ONLY, TRAINERS
from megatron_ds.conversion.registry import open_source, recognize
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from tests.problems import printed_codes, raises_problem
from tests.unit.conversion.models import logits_of


@dataclass(frozen=True)
class Peer:
    """A checkpoint that a trainer wrote itself, with the logits of its own model."""

    name: str
    folder: str
    reference: str
    flags: dict[str, Any] = field(default_factory=dict)
    """Options of the model that its files do not have."""

    def options(self) -> ReadOptions:
        return ReadOptions(model=self.flags, given=frozenset(self.flags))


FIVE_HEADS = {"num_attention_heads": 5}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "rotary_base": 500000.0}
PEERS = (
    Peer("litgpt", "litgpt", "litgpt"),
    Peer("torchtitan", "torchtitan/dcp", "torchtitan", HEADS),
    Peer("torchtitan", "torchtitan/last/step-3", "torchtitan", HEADS),
    Peer("torchtitan", "torchtitan/hf/step-3", "torchtitan", HEADS),
    Peer("olmo_core", "olmo_core/step1", "olmo_core"),
    Peer("olmo_core", "olmo_core/step1/model_and_optim", "olmo_core"),
)
"""Rows of a vocabulary of 128."""
TOLERANCE = 1e-5


def reference_of(folder: Path) -> tuple[Tensor, Tensor]:
    """Tokens [B, S] and logits [B, S, V] of the trainer's own model."""
    with numpy.load(folder / "reference.npz") as arrays:
        return torch.from_numpy(arrays["tokens"]).long(), torch.from_numpy(arrays["logits"])


def opened(peer: Peer, folder: Path) -> SourceCheckpoint:
    return open_source(folder, peer.name, peer.options())


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.folder)
def test_logits_are_those_of_the_trainer(peer: Peer, shared_data: Path) -> None:
    """Claim (conversion): logits of checkpoints that other trainers wrote are those of their own
    programs, to 1e-5"""
    folder = shared_data / "peer_checkpoints2"
    tokens, expected = reference_of(folder / peer.reference)
    source = opened(peer, folder / peer.folder)
    difference = (logits_of(source, tokens) - expected).abs().max()
    assert difference < TOLERANCE
    assert recognize(folder / peer.folder, peer.name).name == peer.name


def copied(peer: Peer, shared_data: Path, tmp_path: Path) -> Path:
    """A copy that can be changed."""
    folder = tmp_path / "copy"
    shutil.copytree(shared_data / "peer_checkpoints2" / peer.folder, folder)
    for path in folder.rglob("*"):
        path.chmod(0o755)
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def link_outside(path: Path) -> None:
    other = path.parent.parent / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


WEIGHTS = (".pth", ".distcp", ".safetensors")
UNREADABLE = (".safetensors", "truncated")
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "checkpoint-file-missing"),
    "truncated": (truncate, "tensor-file-unreadable"),
    "link": (link_outside, "foreign-link-outside"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("peer", PEERS[:-1], ids=lambda peer: peer.folder)
def test_a_damaged_file_is_named(
    peer: Peer, damage: str, shared_data: Path, tmp_path: Path
) -> None:
    folder = copied(peer, shared_data, tmp_path)
    change, code = DAMAGE[damage]
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in WEIGHTS)
    file = next(files)
    change(file)
    code = "foreign-file-unreadable" if (file.suffix, damage) == UNREADABLE else code
    with raises_problem(code, contains=file.name):
        for tensor in opened(peer, folder).tensors.values():
            tensor.read()


def change_state(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(path, weights_only=True)
    change(state["model"])
    torch.save(state, path)


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "unknown": (
        lambda model: model.update({"transformer.h.0.attn.sinks": torch.zeros(4)}),
        "foreign-tensors-unknown",
        "transformer.h.0.attn.sinks",
    ),
    "missing": (
        lambda model: model.pop("transformer.h.1.norm_2.weight"),
        "foreign-tensors-missing",
        "transformer.h.1.norm_2.weight",
    ),
    "shape": (
        lambda model: model.update({"transformer.h.1.mlp.fc_1.weight": torch.zeros(47, 32)}),
        "weights-shape-mismatch",
        "transformer.h.1.mlp.fc_1.weight",
    ),
    "type": (
        lambda model: model.update(
            {"transformer.h.1.mlp.fc_1.weight": torch.zeros(48, 32, dtype=torch.int8)}
        ),
        "weights-type-unsupported",
        "transformer.h.1.mlp.fc_1.weight",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_wrong_tensor_is_named(case: str, shared_data: Path, tmp_path: Path) -> None:
    folder = copied(PEERS[0], shared_data, tmp_path)
    change, code, name = STATES[case]
    change_state(folder / "lit_model.pth", change)
    with raises_problem(code, contains=name):
        open_source(folder)


def test_values_that_are_not_finite_are_refused(shared_data: Path, tmp_path: Path) -> None:
    folder = copied(PEERS[0], shared_data, tmp_path)
    name = "transformer.h.1.attn.qkv.weight"
    change_state(folder / "lit_model.pth", lambda model: model[name][3, 3].fill_(torch.inf))
    with raises_problem("foreign-weights-not-finite", contains=name):
        open_source(folder).tensors["layers.1.attention.qkv.weight"].read()


@pytest.mark.parametrize(
    "lines",
    [
        "latent_attention: {q_lora_rank: 8}",
        "rope_adjustments: {beta_fast: 32, beta_slow: 1, factor: 4.0, original_max_seq_len: 64}",
        "mlp_class_name: OtherMLP",
        "another_key: 3",
    ],
)
def test_settings_that_are_not_supported_are_named(
    lines: str, shared_data: Path, tmp_path: Path
) -> None:
    """All at once."""
    folder = copied(PEERS[0], shared_data, tmp_path)
    with (folder / "model_config.yaml").open("a") as file:
        file.write(f"{lines}\nnorm_1: false\n")
    with raises_problem("foreign-parts-lacking", contains=lines.partition(":")[0]) as raised:
        open_source(folder)
    assert "norm_1" in str(raised.problem)


def test_only_the_rows_that_are_used_are_read(shared_data: Path) -> None:
    """Rows and columns of each tensor are those of the whole one."""
    folder = shared_data / "peer_checkpoints2"
    for peer in PEERS:
        for name, tensor in opened(peer, folder / peer.folder).tensors.items():
            assert not tensor.is_indivisible, name
            whole = tensor.read()
            size = whole.shape[0]
            rows = range(size // 3, size - size // 4)
            assert torch.equal(tensor.read(rows), whole[rows.start : rows.stop]), name
            if whole.dim() == 2:
                spans = [range(1, 5), range(7, 11)]
                part = whole[rows.start : rows.stop]
                expected = torch.cat([part[:, span.start : span.stop] for span in spans], 1)
                assert torch.equal(tensor.read(rows, (1, spans)), expected), name


def test_options_that_shapes_do_not_give_are_asked_for(shared_data: Path) -> None:
    """All at once, by their flags; assumed ones are in a warning."""
    folder = shared_data / "peer_checkpoints2" / "torchtitan" / "last"
    with raises_problem("foreign-options-missing", contains="--num-attention-heads") as raised:
        open_source(folder)
    assert "--rotary-base" in str(raised.problem)
    warnings: list[str] = []
    options = Peer("torchtitan", "", "", HEADS).options()
    source = open_source(folder, "torchtitan", replace(options, warn=warnings.append))
    assert printed_codes("\n".join(warnings)) == ["foreign-options-assumed"]
    assert source.settings.model.norm_epsilon == 1e-5
    flags = {**HEADS, "norm_epsilon": 1e-6, "use_rope_scaling": False, "seq_length": 32}
    warnings.clear()
    options = Peer("torchtitan", "", "", flags).options()
    source = open_source(folder, "torchtitan", replace(options, warn=warnings.append))
    assert warnings == []
    assert (source.settings.model.norm_epsilon, source.settings.model.seq_length) == (1e-6, 32)
    with raises_problem("foreign-heads-wrong", "num_attention_heads", contains="5"):
        open_source(folder, "torchtitan", Peer("", "", "", HEADS | FIVE_HEADS).options())


def change_settings(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values["model"])
    path.write_text(json.dumps(values))


def use_experts(
    model: dict[str, Any],
    router: dict[str, Any] | None = None,
    normalized: Any = None,
    **changes: Any,
) -> None:
    """Puts experts in place of the feed-forward layers."""
    routing = {"top_k": 2, "normalize_expert_weights": normalized, **(router or {})}
    experts = {"name": "dropless", "num_experts": 4, "router": routing, **changes}
    model["block"] |= {"name": "moe", "feed_forward": None, "feed_forward_moe": experts}


OLMO_CORE_SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "sequence_mixer": lambda model: model.update(block_overrides={"0": {"name": "default"}}),
    "norm_position": lambda model: model.update(
        block_overrides={"0": {**model["block"], "name": "reordered_norm"}}
    ),
    "granularity": lambda model: model["block"]["sequence_mixer"].update(
        gate={"granularity": "tokenwise"}
    ),
    "clip_qkv": lambda model: model["block"]["sequence_mixer"].update(clip_qkv=8.0),
    "shared_mlp": lambda model: use_experts(model, shared_mlp={"hidden_size": 32}),
    "capacity": lambda model: use_experts(model, name="default", capacity_factor=1.5),
    "normalize_expert_weights": lambda model: use_experts(model, router={"top_k": 1}, normalized=1),
    "gating_function": lambda model: use_experts(model, router={"gating_function": "sigmoid"}),
    "bias_gamma": lambda model: use_experts(model, router={"bias_gamma": 1e-3}),
    "feed_forward.bias": lambda model: model["block"]["feed_forward"].update(bias=True),
    "layer_norm.name": lambda model: model["block"]["layer_norm"].update(name="nemotron_rms"),
    "rope.another": lambda model: model["block"]["sequence_mixer"]["rope"].update(another=1),
    "dyt": lambda model: model.update(dyt=2),
}


@pytest.mark.parametrize("key", OLMO_CORE_SETTINGS)
def test_settings_of_olmo_core_that_are_not_supported_are_named(
    key: str, shared_data: Path, tmp_path: Path
) -> None:
    peer = next(peer for peer in PEERS if peer.name == "olmo_core")
    folder = copied(peer, shared_data, tmp_path)
    change_settings(folder, OLMO_CORE_SETTINGS[key])
    name = "bias" if key.endswith("bias") else key
    with raises_problem("foreign-parts-lacking", contains=name):
        open_source(folder)


def test_an_index_that_names_other_classes_is_refused(shared_data: Path, tmp_path: Path) -> None:
    """Nothing is imported or run for it."""
    ran = tmp_path / "ran"
    peer = next(peer for peer in PEERS if peer.name == "olmo_core")
    folder = copied(peer, shared_data, tmp_path)
    index = next(folder.rglob(".metadata"))
    names = {"model.blocks.0.attention.w_q.weight": Touch(ran)}
    index.write_bytes(pickle.dumps({"state_dict_metadata": names, "storage_data": {}}))
    with raises_problem("foreign-class-rejected", contains=str(index)):
        open_source(folder, "olmo_core")
    assert not ran.exists()


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_every_trainer_has_a_checkpoint_that_it_wrote() -> None:
    assert {peer.name for peer in PEERS} == {*TRAINERS} - {*READ_ONLY}
