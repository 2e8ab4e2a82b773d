"""Weights written for Megatron: read back, and by the rules that its converters follow."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ds.config.problems import ProblemWarning
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.megatron.write_legacy import write_megatron
from megatron_ds.conversion.megatron.write_torch_dist import write_torch_dist
from megatron_ds.conversion.model_settings import resolved
from megatron_ds.conversion.source import WriteOptions
from tests.problems import raises_problem
from tests.unit.conversion.models import (
    LLAMA,
    OF_CORE,
    OTHER_LLAMA,
    assert_same_tensors,
    logits,
    model,
    random_source,
    random_training,
)


@pytest.mark.parametrize("changes", [{}, OTHER_LLAMA, {"gelu_approximation": "none"}])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_an_export_is_read_back(
    changes: dict[str, Any], tp_size: int, pp_size: int, tmp_path: Path
) -> None:
    """Claim (checkpoints): weights written for Megatron-LM are read back bit for bit, and have the
    logits of transformers' GPT-2 by the rules of its converter"""
    source = random_source(model(**changes))
    write_megatron(source, tmp_path / "out", WriteOptions(tp_size=tp_size, pp_size=pp_size))

    read = open_megatron(tmp_path / "out").weights()

    assert read.settings.fixed == source.settings.fixed
    assert_same_tensors(read, source)


GROUPED = re.compile(r"local_experts\.(\d+)\.(.*)")


@pytest.mark.parametrize("name", OF_CORE)
def test_parts_of_megatron_core_are_read_back(name: str, tmp_path: Path) -> None:
    """Claim (checkpoints): they are written for any tensor-, pipeline- and expert-parallel sizes,
    and as `torch_dist`, and read back bit for bit
    """
    changes, moe = OF_CORE[name]
    source = random_source(model(**changes), moe=moe)
    for sizes in ((1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2), None):
        folder = tmp_path / str(sizes)
        if sizes is None:
            write_torch_dist(source, folder)
        elif moe.is_used or sizes[2] == 1:
            tp_size, pp_size, ep_size = sizes
            options = WriteOptions(tp_size=tp_size, pp_size=pp_size, ep_size=ep_size)
            write_megatron(source, folder, options)
        else:
            continue

        read = open_megatron(folder).weights()

        assert resolved(read.settings) == resolved(source.settings), sizes
        assert_same_tensors(read, source)
    for path in folder.parent.glob("(1, 1, 2)/*/*/model_optim_rng.pt"):  # as of grouped layers
        content = torch.load(path, weights_only=False)
        names = {name: GROUPED.sub(r"\2\1", name) for name in content["model"]}
        content["model"] = {names[name]: value for name, value in content["model"].items()}
        torch.save(content, path)
        assert_same_tensors(open_megatron(path.parents[2]).weights(), source)


@pytest.mark.parametrize("write", [write_megatron, write_torch_dist])
def test_states_of_parts_of_megatron_core_are_not_written(write: Any, tmp_path: Path) -> None:
    config = model(**LLAMA, attention_output_gate=True)
    source = dataclasses.replace(random_source(config), **random_training(config))
    with raises_problem("megatron-export-states"):
        write(source, tmp_path / "out")


def test_a_schedule_that_megatron_lacks_is_warned_of(tmp_path: Path) -> None:
    config = model()
    training = random_training(config)
    for style, expected in (("cosine", []), ("piecewise", ["megatron-lacks-decay-style"])):
        scheduler = training["run"].scheduler | {"lr_decay_style": style}
        run = dataclasses.replace(training["run"], scheduler=scheduler)
        source = dataclasses.replace(random_source(config), **training | {"run": run})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            write_torch_dist(source, tmp_path / style, WriteOptions())
        issued = [entry.message for entry in caught]
        codes = [one.args[0].code for one in issued if isinstance(one, ProblemWarning)]
        assert codes == expected


def gpt2_weights(path: Path) -> dict[str, Tensor]:
    """What transformers' converter of Megatron's GPT-2 made of a file, as its source describes.

    Weights of GPT-2 are transposed, and QKV rows [heads, 3, size] become [3, heads, size].
    """
    state = torch.load(path, weights_only=False)
    args = state["args"]
    language_model = state["model"]["language_model"]
    heads = args.num_attention_heads
    found = {
        "wte.weight": language_model["embedding"]["word_embeddings"]["weight"],
        "wpe.weight": language_model["embedding"]["position_embeddings"]["weight"],
    }
    assert len(found["wte.weight"]) == args.padded_vocab_size
    assert state["checkpoint_version"] == 3.0
    names = {"mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}
    names["self_attention.dense"] = "attn.c_proj"
    for key, value in language_model["encoder"].items():
        match = re.fullmatch(r"layers\.(\d+)\.([a-z0-9_.]+)\.([a-z]+)", key)
        if match is None:
            found[key.replace("final_layernorm", "ln_f")] = value
            continue
        prefix = f"h.{match[1]}"
        operation = match[2]
        kind = match[3]
        if operation.endswith("layernorm"):
            norm = "ln_1" if operation.startswith("input") else "ln_2"
            found[f"{prefix}.{norm}.{kind}"] = value
        elif operation == "self_attention.query_key_value":
            rows = value.view(heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
            found[f"{prefix}.attn.c_attn.{kind}"] = rows.t() if kind == "weight" else rows
        else:
            full = value.t() if kind == "weight" else value
            found[f"{prefix}.{names[operation]}.{kind}"] = full
    return found


def test_transformers_gpt2_computes_the_same_of_an_export(tmp_path: Path) -> None:
    """Claim (checkpoints): weights written for Megatron-LM are read back bit for bit, and have the
    logits of transformers' GPT-2 by the rules of its converter"""
    transformers = pytest.importorskip("transformers")
    config = model(num_layers=2)
    source = random_source(config)
    write_megatron(source, tmp_path / "out")
    weights = gpt2_weights(tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt")
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=128, n_positions=12, n_embd=32, n_layer=2, n_head=4, n_inner=128,
            activation_function="gelu_new",
        )
    ).eval()  # fmt: skip
    theirs.transformer.load_state_dict(weights)
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))

    with torch.no_grad():
        expected = theirs(tokens).logits[..., :50]
    torch.testing.assert_close(logits(source, tokens), expected, atol=1e-4, rtol=1e-5)


PARTLY = {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_layers": "2"}


@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": "alibi"},
        {"activation": "geglu"},
        {"embed_layernorm": True},
        {"norm_position": "reordered"},
        {"logits_multiplier": 0.5},
        {"attn_logit_softcapping": 9.5},
        {"softmax_scale": 0.25},
        PARTLY,
    ],
)
@pytest.mark.parametrize("write", [write_megatron, write_torch_dist])
def test_parts_that_megatron_lacks_are_named(
    write: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    *_, value = changes.values()
    shown = "norm of the embedding" if value is True else str(value)
    with raises_problem("megatron-export-unsupported", contains=shown):
        write(random_source(model(**changes)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stages_must_divide_the_layers(tmp_path: Path) -> None:
    with raises_problem("megatron-export-stages", contains="4 layers"):
        write_megatron(random_source(model()), tmp_path / "out", WriteOptions(pp_size=3))


def test_a_type_is_recorded(tmp_path: Path) -> None:
    source = random_source(model()).to(torch.bfloat16)
    write_megatron(source, tmp_path / "out")
    path = tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    args = torch.load(path, weights_only=False)["args"]
    assert (args.bf16, args.fp16) == (True, False)
    read = open_megatron(tmp_path / "out").weights()
    assert {tensor.dtype for tensor in read.tensors.values()} == {torch.bfloat16}
    assert dataclasses.asdict(read.settings.model)["num_layers"] == 4
