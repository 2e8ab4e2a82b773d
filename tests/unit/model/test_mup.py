"""muP: rates, deviations and multipliers, by the `mup` package, Megatron-LM and CompleteP.

tests/golden/mup_package.json has what the package of Yang et al. 2022 gives for the shapes of a
small model. `python tests/unit/model/test_mup.py` writes it again, with `mup` installed
(`pip install --no-deps mup`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import Config, ModelConfig, MoEConfig, OptimizerConfig
from megatron_ds.config.fields import field_problems
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.declaration.architecture import is_state, model_spec, unit_weights
from megatron_ds.model.declaration.rates import multiplier_rule
from megatron_ds.model.declaration.residual import residual_form
from megatron_ds.model.declaration.transfer_table import transfer_lines
from megatron_ds.parallel.weights import Role, Weight
from tests.dist.parity_cases import MODELS, SHAPE
from tests.problems import codes, raises_problem

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "mup_package.json"
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 64,
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.05,
}
WIDE = {**BASE, "hidden_size": 64, "num_attention_heads": 8}
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 16}
WIDTH = 4
LATENT = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 8,
    "qk_layernorm": True,
}
EXPERTS = MoEConfig(
    num_experts=(4,), moe_latent_size=8, moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)  # fmt: skip


def weights_of(model: ModelConfig, moe: MoEConfig | None = None) -> dict[str, Weight]:
    """The declared parameters."""
    spec = model_spec(model, *(() if moe is None else (moe,)))
    return {name: weight for name, weight in spec.weights().items() if not is_state(weight)}


def wide(**options: Any) -> ModelConfig:
    return ModelConfig(**{**WIDE, **MUP, **options})


def factors_of(model: ModelConfig, **options: Any) -> dict[str, Any]:
    rule = multiplier_rule(OptimizerConfig(lr=0.1, weight_decay=0.1, **options), model)
    return {name: rule(weight) for name, weight in weights_of(model).items()}


@pytest.mark.parametrize("name", ["unit", *MODELS, "experts"])
def test_every_weight_declares_which_of_its_dimensions_grow(name: str) -> None:
    """Claim (precision): every weight of every part declares which of its dimensions grow with
    the width of the model, for muP"""
    if name == "unit":
        weights = unit_weights()
    elif name in MODELS:
        weights = weights_of(ModelConfig(**SHAPE, **MODELS[name]))
    else:
        weights = weights_of(ModelConfig(**BASE), EXPERTS)
    declared = [weight for weight in weights.values() if not is_state(weight)]
    assert [w.name for w in declared if len(w.widths) != len(w.shape)] == []
    # What is as large as the vocabulary, the positions or the experts does not grow.
    fixed = {w.name for w in declared if w.widths[0] is None and w.role is not Role.VECTOR}
    assert {"embedding.word.weight"} <= fixed
    for weight in declared:
        if weight.role in (Role.WORDS, Role.OUTPUT, Role.POSITIONS):
            assert weight.widths[0] is None
            assert weight.widths[1] is not None
        elif weight.role is Role.MATRIX:
            assert weight.widths[-1] is not None, weight.name


def package_rules() -> dict[str, dict[str, float]]:
    """Factors of the learning rate, the decay and the deviation that the package gives."""
    import mup
    import torch
    from torch import nn

    class Shapes(nn.Module):
        """Parameters with the names and shapes of the declaration."""

        def __init__(self, width: int) -> None:
            super().__init__()
            sizes = {"hidden_size": 16 * width, "num_attention_heads": 2 * width}
            for name, weight in weights_of(ModelConfig(**{**BASE, **sizes})).items():
                self.register_parameter(
                    name.replace(".", "/"), nn.Parameter(torch.zeros(weight.shape))
                )

    model = Shapes(WIDTH)
    mup.set_base_shapes(model, Shapes(1), delta=Shapes(2))
    optimizer = mup.MuAdamW(model.parameters(), lr=1.0, weight_decay=1.0)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    rules = {}
    for name, p in model.named_parameters():
        scales: list[float] = []

        def record(tensor: Any, scale: float = 1.0, scales: list[float] = scales) -> None:
            scales.append(scale)

        mup.init.constant_std_init_(p, record)
        rules[name.replace("/", ".")] = {
            "lr": groups[p]["lr"],
            "weight_decay": groups[p]["weight_decay"],
            "std": scales[-1],
        }
    readout = mup.MuReadout(16 * WIDTH, 64)
    mup.set_base_shapes(readout, mup.MuReadout(16, 64), delta=mup.MuReadout(32, 64))
    return rules | {"logits": {"factor": 1 / readout.width_mult()}}


def test_widths_equal_the_mup_package() -> None:
    """Claim (precision): over widths, learning rates, weight decays and initial deviations of muP
    equal those of the `mup` package for AdamW"""
    golden = json.loads(GOLDEN.read_text())
    model = wide(mup_independent_weight_decay=True)
    assert model.logits_factor == golden.pop("logits")["factor"]
    plain = weights_of(ModelConfig(**WIDE))
    factors = factors_of(model)
    assert factors.keys() == golden.keys()
    for name, weight in weights_of(model).items():
        rule = golden[name]
        assert factors[name].lr == rule["lr"], name
        if weight.role is not Role.VECTOR:  # which never decay here
            assert factors[name].weight_decay == rule["weight_decay"], name
            assert weight.std == pytest.approx(plain[name].std * rule["std"]), name


def test_the_recorded_rules_are_those_of_the_package() -> None:
    pytest.importorskip("mup")
    assert package_rules() == json.loads(GOLDEN.read_text())


def test_widths_equal_the_formulas_of_megatron() -> None:
    """Claim (precision): `--use-mup` has the factors of Megatron-LM's `get_mup_config_overrides`
    and of its `TransformerConfig`"""
    model = wide(kv_channels=16, embedding_init_method_std=0.5)
    # transformer_config.py: softmax_scale, mup_output_mult, init methods.
    assert attention_rules(model)[0].scale == 1 / 16
    assert wide(mup_base_head_dim=4.0, mup_attn_scale_power=0.5).score_scale == 2 / 8**0.5
    assert wide(softmax_scale=0.3).score_scale == 0.3
    assert (model.logits_factor, wide(mup_output_mult=2.0).logits_factor) == (1 / WIDTH, 2.0)
    assert wide(mup_embedding_mult=3.0).embedding_factor == 3.0
    assert residual_form(model).scale == 1.0
    deviations = {name: weight.std for name, weight in weights_of(model).items() if weight.std}
    hidden = 0.05 / math.sqrt(WIDTH)
    for name, std in deviations.items():
        if name.endswith(("proj.weight", "fc_out.weight")):
            assert std == pytest.approx(hidden / math.sqrt(2 * model.num_layers))
        else:
            assert std == pytest.approx(hidden if name.startswith("layers.") else 0.5)
    # optimizer/__init__.py: learning rate and epsilon of Adam, rates of SGD.
    for name, factors in factors_of(model).items():
        is_hidden = name.startswith("layers.") and name.removesuffix(".weight") != name
        is_hidden &= "norm" not in name
        assert factors.lr == factors.eps == (1 / WIDTH if is_hidden else 1.0), name
        assert factors.weight_decay in (0.0, 1.0)
    for name, factors in factors_of(model, optimizer="sgd").items():
        is_matrix = name.endswith(("qkv.weight", "proj.weight", "fc_in.weight", "fc_out.weight"))
        assert (factors.lr, factors.eps) == (1.0 if is_matrix else WIDTH, 1.0), name
    decoupled = factors_of(model, optimizer="sgd", decoupled_lr=0.2)
    assert decoupled["embedding.word.weight"].lr == 1.0


@pytest.mark.parametrize("switch", [{}, {"normuon": True}])
def test_steps_of_orthogonal_matrices_keep_their_rate(switch: dict[str, Any]) -> None:
    """Claim (precision): with muP, Muon and NorMuon keep the learning rate of matrices, as in
    Megatron-LM; SOAP and Lion scale it as Adam does"""
    muon = factors_of(wide(), optimizer="muon", **switch)
    assert {factors.lr for factors in muon.values()} == {1.0}
    assert {factors.eps for factors in muon.values()} == {1.0}
    for optimizer in ("soap", "lion"):
        rates = factors_of(wide(), optimizer=optimizer)
        assert rates["layers.0.mlp.fc_in.weight"].lr == 1 / WIDTH
        assert rates["embedding.word.weight"].lr == 1.0


def test_depths_follow_completep() -> None:
    """Claim (precision): with `--mup-base-num-layers`, residual factor, deviations and epsilons are
    those of CompleteP (Dey et al. 2025, table 1, alpha = 1)"""
    model = wide(num_layers=8, mup_base_num_layers=2, mup_independent_weight_decay=True)
    depth = 4
    assert residual_form(model).scale == 1 / depth
    weights = weights_of(model)
    assert weights["layers.7.mlp.fc_out.weight"].std == pytest.approx(0.05 / (2 * 2**0.5 * 2**0.5))
    factors = factors_of(model)
    for name, weight in weights.items():
        is_table = weight.role in (Role.WORDS, Role.OUTPUT, Role.POSITIONS)
        assert factors[name].eps == 1 / (WIDTH if is_table else WIDTH * depth), name
        is_matrix = weight.role is Role.MATRIX
        assert factors[name].lr == (1 / WIDTH if is_matrix else 1.0), name
        if is_matrix:
            assert factors[name].weight_decay == WIDTH
    # At the base depth and width everything is as without muP, but for the attention's scale.
    base = wide(mup_base_hidden_size=64, mup_base_num_layers=2)
    plain = weights_of(ModelConfig(**WIDE))
    assert [w.std for w in weights_of(base).values()] == [w.std for w in plain.values()]
    assert set(factors_of(base).values()) == set(factors_of(ModelConfig(**WIDE)).values())


def test_experts_and_latent_attention_scale_by_their_inputs() -> None:
    for model, moe in ((wide(**LATENT), None), (wide(), EXPERTS)):
        rule = multiplier_rule(OptimizerConfig(lr=0.1), model)
        for name, weight in weights_of(model, moe).items():
            plain = weights_of(ModelConfig(**{**WIDE, **(LATENT if moe is None else {})}), moe)
            is_matrix = weight.role is Role.MATRIX
            assert rule(weight).lr == (1 / WIDTH if is_matrix else 1.0), name
            ratio = WIDTH**0.5 if is_matrix else 1.0
            assert weight.std == pytest.approx(plain[name].std / ratio), name
    scale = attention_rules(wide(**LATENT))[0].scale
    assert scale == 1 / wide(**LATENT).head_dim


def test_the_table_shows_each_weight() -> None:
    model = wide(mup_base_num_layers=1, mup_base_head_dim=8.0)
    lines = transfer_lines(Config(model=model, optimizer=OptimizerConfig(lr=1e-3)))
    assert lines[0].startswith("muP: width x 4, depth x 2, embedding times 1, ")
    assert lines[0].endswith("attention and MLP times 0.5, logits times 0.25")
    cells = {words[0]: words[1:] for words in map(str.split, lines[2:])}
    assert cells["layers.*.mlp.fc_in.weight"] == ["0.025", "0.00025", "1.25e-09", "0.01"]
    assert cells["embedding.word.weight"] == ["0.05", "0.001", "2.5e-09", "0.01"]
    assert transfer_lines(Config(model=ModelConfig(**WIDE))) == []


def test_what_mup_sets_is_not_set_otherwise() -> None:
    for name in ("embedding_multiplier", "residual_multiplier", "logits_multiplier"):
        assert codes(wide(**{name: 0.5}).problems(1)) == ["mutually-exclusive"]
    assert codes(wide(init_method_xavier_uniform=True).problems(1)) == ["mutually-exclusive"]
    for power in (500.0, -500.0):  # the factor of the scores would be no number
        config = Config(model=wide(mup_attn_scale_power=power))
        assert "out-of-range" in codes(config.problems(1))
    with raises_problem("mup-undeclared-weight"):
        multiplier_rule(OptimizerConfig(lr=0.1), wide())(Weight("layers.0.x.weight", (4, 4)))


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({"mup_output_mult": 1e30}, "out-of-range: mup_output_mult"),
        ({"mup_embedding_mult": 1e-30}, "out-of-range: mup_embedding_mult"),
        ({"mup_base_head_dim": 1e30}, "out-of-range: mup_base_head_dim"),
        ({"mup_base_hidden_size": 0}, "out-of-range: mup_base_hidden_size"),
        ({"mup_base_hidden_size": 64 * 1024, "mup_base_num_layers": 2 * 1024}, ""),
        ({"mup_base_hidden_size": 64 * 1025}, "mup-base-too-far: mup_base_hidden_size hidden_size"),
        ({"mup_base_num_layers": 2 * 1025}, "mup-base-too-far: mup_base_num_layers num_layers"),
        (
            {"hidden_size": 16 * 1025, "num_attention_heads": 1025},
            "mup-base-too-far: mup_base_hidden_size hidden_size",
        ),
    ],
)
def test_sizes_and_factors_that_cannot_be_meant_are_refused(
    options: dict[str, Any], problems: str
) -> None:
    """Claim (command-line): factors of muP beyond all use, and base models more than 1,024 times
    as large or as small as the model, are refused by name; bases and factors that most likely mean
    something else are warned of"""
    model = wide(**options)
    listed = [*field_problems(model), *model.transfer_problems()]
    named = [f"{problem.code}: {' '.join(problem.fields)}" for problem in listed]
    assert named == ([problems] if problems else [])


@pytest.mark.parametrize(
    ("options", "lr", "expected"),
    [
        ({}, 3e-3, []),
        ({"mup_output_mult": 1.0}, 3e-3, []),
        ({"mup_output_mult": 24.0}, 3e-3, []),
        ({"mup_output_mult": 26.0}, 3e-3, ["mup-logits-large"]),
        ({"mup_output_mult": 24.0, "embedding_init_method_std": 0.1}, 3e-3, ["mup-logits-large"]),
        ({"mup_base_hidden_size": 8}, 3e-3, []),
        ({"mup_base_hidden_size": 4}, 3e-3, ["mup-base-narrower-than-head"]),
        ({"mup_base_hidden_size": 2048}, 3e-3, []),
        ({"mup_base_hidden_size": 4096}, 3e-3, ["mup-rate-large"]),
        ({"use_mup": False, "mup_base_hidden_size": 4096}, 3e-3, []),
        ({"mup_base_hidden_size": 0}, 3e-3, []),
        ({"num_attention_heads": 0, "mup_base_hidden_size": 4}, 3e-3, []),
    ],
)
def test_bases_and_factors_that_most_likely_mean_something_else_are_warned_of(
    options: dict[str, Any], lr: float, expected: list[str]
) -> None:
    config = Config(model=wide(**options), optimizer=OptimizerConfig(lr=lr))
    assert codes(config.warnings()) == expected
    # Their steps are bounded otherwise.
    sgd = Config(model=wide(**options), optimizer=OptimizerConfig(lr=lr, optimizer="sgd"))
    assert "mup-rate-large" not in codes(sgd.warnings())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(package_rules(), indent=1) + "\n")
