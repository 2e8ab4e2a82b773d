"""Parameter groups and the learning rate and weight decay that each gets."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from megatron_ds.config import Config, ModelConfig, MoEConfig, OptimizerConfig
from megatron_ds.config.problems import raise_if_any
from megatron_ds.engine.optimizers.param_groups import (
    keep_settings_on_load,
    parameter_groups,
    reused_states,
    set_lr_and_weight_decay,
)
from megatron_ds.model.declaration.architecture import model_spec, param_group_problems
from megatron_ds.model.declaration.rates import Multipliers, multiplier_rule
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import declare
from megatron_ds.parallel.weights import Role, Weight
from tests.problems import raises_problem

DIMENSIONS = ("hidden_size", "num_attention_heads", "seq_length", "vocab_size")
SIZES: dict[str, int] = {"num_layers": 1, **dict.fromkeys(DIMENSIONS, 4)}


def test_default_rule_decays_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups, multipliers = parameter_groups(model, weight_decay=0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert multipliers == (Multipliers(1.0, 1.0), Multipliers(1.0, 0.0))
    assert groups[0]["params"] == [model[0].weight]
    assert len(groups[1]["params"]) == 3


def test_muon_updates_the_matrices_of_layers_and_stacked_ones() -> None:
    rule = multiplier_rule(OptimizerConfig(optimizer="muon"), ModelConfig())
    config = ModelConfig(**SIZES)
    weights = model_spec(config, MoEConfig(num_experts=(4,))).weights()
    matrices = [name for name, weight in weights.items() if rule(weight).is_matrix]
    assert [name.removeprefix("layers.0.") for name in matrices] == [
        "attention.qkv.weight",
        "attention.proj.weight",
        "mlp.router.weight",
        "mlp.experts.fc_in.weight",
        "mlp.experts.fc_out.weight",
    ]
    groups, multipliers = parameter_groups(model := Named(), 0.1, rule)
    chosen = [group["params"] for group in groups if group.get("is_matrix")]
    assert chosen == [[model.layers["0"].weight]]
    assert sum(factors.is_matrix for factors in multipliers) == 1


def test_rule_scales_learning_rate_and_weight_decay_of_each_parameter() -> None:
    def rule(weight: Weight) -> Multipliers:
        lr = 0.1 if weight.name == "1.weight" else 1.0
        return Multipliers(lr=lr, weight_decay=1 / weight.shape[0])

    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
    groups, multipliers = parameter_groups(model, 0.8, rule)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr_and_weight_decay(optimizer.param_groups, multipliers, lr=0.5, weight_decay=0.4)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0.1),
        (0.05, 0.2),
    ]


class Named(nn.Module):
    """Parameters with canonical names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word": nn.Embedding(4, 2), "position": nn.Embedding(4, 2)})
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 2)})
        self.head = nn.Linear(2, 4, bias=False)
        roles = {"word": Role.WORDS, "position": Role.POSITIONS, "head": Role.OUTPUT}
        for name, parameter in self.named_parameters():
            if (role := roles.get(name.split(".")[-2])) is not None:
                weight = Weight(name, tuple(parameter.shape), role=role)
                declare(parameter, weight, Mesh.single().tp)


def settings_of(model: nn.Module, options: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter, scheduled at half of both."""
    groups, multipliers = parameter_groups(
        model, options.weight_decay, multiplier_rule(options, ModelConfig())
    )
    optimizer = torch.optim.SGD(groups, lr=1.0)
    decoupled = None if options.decoupled_lr is None else options.decoupled_lr / 2
    decay = options.weight_decay / 2
    set_lr_and_weight_decay(optimizer.param_groups, multipliers, options.lr / 2, decay, decoupled)
    found = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def test_embeddings_and_output_layer_may_have_their_own_settings() -> None:
    options = OptimizerConfig(lr=1.0, weight_decay=0.5, decoupled_lr=3.0, embedding_weight_decay=2)
    assert settings_of(Named(), options) == {
        "embedding.word.weight": (1.5, 1.0),
        "embedding.position.weight": (0.5, 1.0),
        "layers.0.weight": (0.5, 0.25),
        "layers.0.bias": (0.5, 0.0),
        "head.weight": (1.5, 0.25),
    }
    undecayed = OptimizerConfig(lr=1.0, weight_decay=0.5, embedding_weight_decay=0.0)
    assert settings_of(Named(), undecayed)["embedding.word.weight"] == (0.5, 0.0)
    assert settings_of(Named(), undecayed)["head.weight"] == (0.5, 0.25)


def test_the_first_pattern_that_matches_a_name_sets_its_rates() -> None:
    groups = "layers.*.bias,wd=0.1", "layers.*,lr=0.1x", "*.w*,lr=2.0,wd=0.5x", "head*,lr=0,wd=0"
    options = OptimizerConfig(lr=1.0, weight_decay=0.5, decoupled_lr=3.0, embedding_weight_decay=2)
    options = dataclasses.replace(options, param_group=tuple(f"pattern={one}" for one in groups))
    assert settings_of(Named(), options) == {
        "embedding.word.weight": (1.0, 0.5),
        "embedding.position.weight": (1.0, 0.5),
        "layers.0.weight": (0.05, 0.25),
        "layers.0.bias": (0.5, 0.05),
        "head.weight": (1.0, 0.125),
    }
    config = Config().with_values({**SIZES, "param_group": options.param_group[:2]})
    assert list(param_group_problems(config)) == []
    for texts, words in (
        (("pattern=*.q_proj.weight,lr=1",), "layers.0.attention.proj.weight"),
        (("pattern=layers.*,lr=1", "pattern=layers.0.*,lr=2"), "layers.0.*,lr=2: earlier patterns"),
    ):
        with raises_problem("param-group-invalid", contains=words):
            raise_if_any(param_group_problems(config.with_values({"param_group": texts})))


def test_parameter_partitioned_by_zero3_is_grouped_by_its_original_shape() -> None:
    model = nn.Linear(3, 4, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.ds_shape = torch.Size((4, 3))
    assert parameter_groups(model, 0.1)[1] == (Multipliers(1.0, 1.0),)


class CountingAdam(torch.optim.Optimizer):
    """Counts steps as integers in states and groups, as DeepSpeed's and NVIDIA's FusedAdam do."""

    def __init__(self, params: list[nn.Parameter], betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 1.0, "betas": betas, "bias_correction": True})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state["step"] = group["step"]


def stepped(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.Optimizer:
    keep_settings_on_load(optimizer)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def test_an_optimizer_loads_states_of_another_class_and_keeps_its_settings() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    adamw = stepped(torch.optim.AdamW([weight], lr=0.1, betas=(0.5, 0.6), eps=0.3), 3)
    counting = stepped(CountingAdam([weight], (0.7, 0.8)), 5)
    saved = adamw.state_dict()
    saved_by_counting = counting.state_dict()

    counting.load_state_dict(saved)
    (group,) = counting.param_groups
    assert (group["betas"], group["bias_correction"], group["step"]) == ((0.7, 0.8), True, 3)
    assert counting.state[weight]["step"] == 3
    assert isinstance(counting.state[weight]["step"], int)

    adamw.load_state_dict(saved_by_counting)
    (group,) = adamw.param_groups
    assert (group["betas"], group["eps"], group["lr"]) == ((0.5, 0.6), 0.3, 0.1)
    assert {"step", "bias_correction"}.isdisjoint(group)
    assert torch.is_tensor(adamw.state[weight]["step"])
    assert adamw.state[weight]["step"] == 5


def test_a_count_of_steps_that_only_the_group_has_is_loaded() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    counting = stepped(CountingAdam([weight], (0.7, 0.8)), 5)
    saved = counting.state_dict()
    for state in saved["state"].values():
        del state["step"]
    adamw = stepped(torch.optim.AdamW([weight]), 0)
    adamw.load_state_dict(saved)
    assert adamw.state[weight]["step"] == 5
    counting.load_state_dict(saved)
    assert counting.param_groups[0]["step"] == 5


def test_loaded_states_are_copied_into_the_memory_of_those_before() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    source, target, fresh = (torch.optim.AdamW([weight], lr=0.1) for _ in range(3))
    source.step()
    source.step()
    target.step()
    before = {key: value.data_ptr() for key, value in target.state[weight].items()}
    saved = source.state_dict()
    for optimizer in (target, fresh):
        with reused_states(optimizer):
            optimizer.load_state_dict(saved)
        for key, value in optimizer.state[weight].items():
            torch.testing.assert_close(value, saved["state"][0][key], rtol=0, atol=0)
            assert value.data_ptr() != saved["state"][0][key].data_ptr()
    assert {key: value.data_ptr() for key, value in target.state[weight].items()} == before
