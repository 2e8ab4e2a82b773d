"""The parity cases: their axes, and the rule that selects the cases that run.

The rule: a case is one value for each of six axes (`AXES`), and the selected cases are a covering
array. *Any three values of three different axes other than the model occur together in at least one
case, and so does every model with every value of every other axis.* So every ZeRO stage meets every
tensor-parallel size with every accumulation, and every model meets every stage, size and optimizer;
an error that needs more particular values together can be missed. The array is built greedily and
deterministically: the same cases in every run. The full product, 448 cases, is run by

    MEGATRON_DS_PARITY=all python -m pytest --timeout 0 tests/dist/test_parity.py
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_ds.config import (
    Config,
    DeepSpeedConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
)
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.train_state import StepPlan
from tests.dist.reference import Run, Samples, train_reference

STEPS = 3
SAMPLES_PER_STEP = 16
"""Global batch of every case, so that one reference run serves all layouts of a model."""
SEED = 5

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "seq_length": 16,
    "vocab_size": 90,  # of 96 padded rows: the last rank's shard has padding
    "make_vocab_size_divisible_by": 32,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.1,
}
SAMPLES = Samples(STEPS * SAMPLES_PER_STEP, SHAPE)
MODELS: dict[str, dict[str, Any]] = {
    "learned": {"position_embedding_type": "learned_absolute"},
    "rope": {"position_embedding_type": "rope", "rotary_percent": 0.5},
    "alibi": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "gqa": {"position_embedding_type": "rope", "num_query_groups": 2},
    "swiglu": {
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
    "tied": {"position_embedding_type": "none", "untie_embeddings_and_output_weights": False},
    "untied": {
        "position_embedding_type": "none",
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
    },
}

# AdamW divides by sqrt(v) + eps. Where a gradient g is far above eps its first update is lr times
# the sign of g, and where g is rounding noise that sign is random, even between two runs of torch.
# The update's slope is at most lr / eps: lr 0.01, eps 1e-3 and gradients that are right to 1e-8
# after clipping keep the error below 1e-7 of a weight, and the elements on both sides of eps (0.001
# against clipped gradients of up to 0.01) still take Adam's nonlinear path.
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "sgd": OptimizerConfig(
        optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0
    ),
    "adamw": OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-3,
        weight_decay=0.1,
        clip_grad=0.1,
    ),
    "lion": OptimizerConfig(
        optimizer="lion", lr=0.001, lion_beta2=0.95, weight_decay=0.1, clip_grad=0.1
    ),
    "muon": OptimizerConfig(
        optimizer="muon", lr=0.01, adam_eps=1e-3, weight_decay=0.1, clip_grad=0.1
    ),
    "grouped": OptimizerConfig(
        lr=0.01,
        decoupled_lr=0.03,
        adam_eps=1e-3,
        weight_decay=0.1,
        embedding_weight_decay=0.4,
        clip_grad=0.1,
    ),
}
RATES: dict[str, tuple[float, ...]] = {
    "sgd": (1.0, 0.5, 0.25),
    "adamw": (0.01, 0.02, 0.005),
    "lion": (0.001, 0.002, 0.0005),
    "muon": (0.01, 0.02, 0.005),
    "grouped": (0.01, 0.02, 0.005),
    "8-bit": (0.01, 0.02, 0.005),
}
"""Learning rate of each step."""
OPTIMIZERS["8-bit"] = dataclasses.replace(OPTIMIZERS["adamw"], use_bnb_optimizer=True)


@dataclass(frozen=True)
class Case:
    """One value for each axis."""

    world: int
    stage: int
    tp: int
    accumulation: int
    model: str
    optimizer: str

    @property
    def name(self) -> str:
        return (
            f"{self.world}ranks-zero{self.stage}-tp{self.tp}-accumulate{self.accumulation}"
            f"-{self.model}-{self.optimizer}"
        )

    @property
    def micro_batch_size(self) -> int:
        return SAMPLES_PER_STEP // (self.world // self.tp * self.accumulation)


EIGHT_BIT = tuple(
    Case(2, stage, tp, 4, "learned", "8-bit") for stage, tp in ((0, 1), (1, 2), (2, 1), (3, 2))
)
"""Cases of 8-bit Adam, which follows AdamW."""


AXES: dict[str, tuple[Any, ...]] = {
    "world": (2, 4),
    "stage": (0, 1, 2, 3),
    "tp": (1, 2),
    "accumulation": (1, 4),
    "model": tuple(MODELS),
    "optimizer": ("sgd", "adamw"),
}


def combinations(axes: Iterable[str]) -> list[tuple[str, ...]]:
    """The axes whose values must occur together: layouts by three, each with the model."""
    layout = [axis for axis in axes if axis != "model"]
    return [*itertools.combinations(layout, 3), *(("model", axis) for axis in layout)]


def demands(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    """The combinations of values that a case covers."""
    return {tuple((axis, getattr(case, axis)) for axis in axes) for axes in combinations(AXES)}


@functools.cache
def product() -> tuple[Case, ...]:
    assert tuple(AXES) == tuple(field.name for field in fields(Case))
    return tuple(Case(*values) for values in itertools.product(*AXES.values()))


@functools.cache
def covering() -> tuple[Case, ...]:
    """The covering array: each case is the first of those with the most uncovered combinations."""
    left = {case: demands(case) for case in product()}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(left[case] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return tuple(sorted(chosen, key=astuple))


def chosen() -> tuple[Case, ...]:
    """The cases that run: the covering array, or all if MEGATRON_DS_PARITY is "all"."""
    return product() if os.environ.get("MEGATRON_DS_PARITY") == "all" else covering()


def other_optimizers() -> Iterator[Case]:
    """Cases of the other optimizers: every stage, two replicas, tensor-parallel sizes 1 and 2.

    Muon meets fused queries, keys and values of different sizes, and a fused gate.
    """
    for stage, (world, tp) in itertools.product(AXES["stage"], ((2, 1), (4, 2))):
        accumulation = 4 if world == 2 else 1
        yield Case(world, stage, tp, accumulation, "learned", "lion")
        model = "gqa" if (stage + tp) % 2 else "swiglu"
        yield Case(world, stage, tp, accumulation, model, "muon")
    # Embeddings and output layer in groups of their own.
    for stage, tp, model in ((0, 2, "untied"), (1, 1, "alibi"), (3, 2, "untied")):
        yield Case(2, stage, tp, 4, model, "grouped")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def folder() -> Path:
    """For DeepSpeed files; it is removed when this process ends."""
    return Path(_folder().name)


def config_of(case: Case, **changes: dict[str, Any]) -> Config:
    """The configuration of a case, the ZeRO stage taken from a DeepSpeed file as a user would.

    The file lowers the thresholds: ZeRO-3 partitions even toy parameters, and gradients are reduced
    in several buckets.

    Args:
        case: The case.
        changes: Changed fields by group: `model={"hidden_dropout": 0.1}`.
    """
    zero = {
        "stage": case.stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 4000,
        "allgather_bucket_size": 4000,
    }
    path = folder() / f"zero{case.stage}.json"
    path.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    config = Config(
        model=ModelConfig(**SHAPE, **MODELS[case.model]),
        parallel=ParallelConfig(tensor_model_parallel_size=case.tp),
        optimizer=OPTIMIZERS[case.optimizer],
        schedule=ScheduleConfig(
            micro_batch_size=case.micro_batch_size,
            global_batch_size=SAMPLES_PER_STEP,
            train_iters=STEPS,
        ),
        deepspeed=DeepSpeedConfig(deepspeed_config=str(path)),
    )
    groups = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in changes.items()
    }
    # Completed and checked as by the command line, except for the data.
    config, problems = merge_file(dataclasses.replace(config, **groups), case.world)
    problems += config.model.problems(config.parallel.tensor_model_parallel_size)
    problems += config.optimizer.problems()
    problems += config.schedule.problems(config.parallel, case.world)
    assert problems == [], problems
    return config


def plans_of(case: Case) -> list[StepPlan]:
    """The steps of a case."""
    return [
        StepPlan(
            iteration=step + 1,
            global_batch_size=SAMPLES_PER_STEP,
            num_micro_batches=case.accumulation,
            lr=rate,
            weight_decay=OPTIMIZERS[case.optimizer].weight_decay,
            seq_length=SHAPE["seq_length"],
            decoupled_lr=3 * rate if case.optimizer == "grouped" else None,
        )
        for step, rate in enumerate(RATES[case.optimizer])
    ]


@functools.cache
def reference_of(model: str, optimizer: str) -> Run:
    """The run of one process, which all layouts of a model and an optimizer share."""
    case = Case(1, 0, 1, 1, model, optimizer)
    return train_reference(config_of(case), SAMPLES, plans_of(case))
