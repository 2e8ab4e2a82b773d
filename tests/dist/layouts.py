"""Layouts of the support matrix as runs: their command lines, references and covering array.

A run is a layout of `megatron_ds.config.support_matrix` with a number of ranks, an accumulation and
a model (`EXTRA`). Its configuration is that of the flags which the matrix names, read by the
command line's own validator. The covering array has *every pair of values of any two axes that the
matrix accepts*, in as few runs as a greedy search finds; `random_runs` draws whole runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis
from hypothesis import strategies

from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config, support_matrix
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.train_state import StepPlan
from tests.dist.offload_harness import SMALLEST_SWAPPED, WITHOUT_LIBAIO
from tests.dist.parity_cases import SAMPLES_PER_STEP, SHAPE, ds_file, folder, scheduled_plans
from tests.dist.recorded import Replay
from tests.dist.reference import Run, Samples, train_reference
from tests.optimizers import flags_of
from tests.tables import tables

TABLES = tables(__file__)

STEPS = 10
"""At most, of a run."""
EXTRA: dict[str, dict[str, str]] = TABLES["extra"]
"""What varies besides the layout, with its flags."""
VALUES = {name: tuple(axis.values) for name, axis in support_matrix.AXES.items()} | {
    name: tuple(values) for name, values in EXTRA.items()
}
ON_DISK = ("nvme optimizer", "nvme")
BASIC = {"zero", "tp", "pp", "cp", "sp"}
"""Axes of whose values `make test` has all pairs, besides every value of every axis."""
SIZES = ("tp", "cp", "sp", "pp")
"""Axes whose sizes multiply to the ranks of a replica."""
ADDED_LATER = [
    *(("optimizer", name) for name in VALUES["optimizer"][4:]),
    ("model", "mup"),
    *(("fp8", name) for name in VALUES["fp8"][1:]),
]
"""Values, each of whose pairs leave the runs of the values before it as they are."""
NOT_COMPARABLE = (
    # Each rank of a shared sequence draws the masks of its own part: not those of one process.
    {"dropout": "hidden", "sp": support_matrix.MANY},
    {"dropout": "hidden", "cp": support_matrix.MANY},
    # It needs at least four micro-batches.
    {"schedule": "dualpipev", "accumulation": "1"},
)
"""Runs that are left out."""
TEST_FLAGS = {
    ("schedule", "dualpipev"): "--num-layers 4",
    **dict.fromkeys(
        [("experts", "replicated"), ("experts", "distributed")],
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --moe-router-score-function sigmoid "
        "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk-scaling-factor 1.5 "
        "--moe-ffn-hidden-size 32 --moe-latent-size 24 "
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
    ),
    **{("fp8", name): "--fp8-min-features 1" for name in ("tensorwise", "rowwise")},
    ("fp8", "blockwise"): "--fp8-min-features 1 --fp8-block-size 2",
    ("precision", "fp16"): "--allow-fp16-on-cpu --loss-scale 512",
    **{("optimizer", name): flags_of(name) for name in support_matrix.AXES["optimizer"].values},
}
"""Flags that a value needs besides those of the matrix, in these tests."""
SAMPLES = Samples(STEPS * SAMPLES_PER_STEP, SHAPE)
WITH_DOCUMENTS = SAMPLES.with_document_ends(0.2)

RunLayout = Mapping[str, str]
"""A value for each axis of `VALUES`."""


def name_of(run: RunLayout) -> str:
    """What differs from the defaults: `zero3-tp>1-2ranks`."""
    changed = [
        f"{axis}-{run[axis]}".replace(" ", "")
        for axis in support_matrix.AXES
        if run[axis] != support_matrix.AXES[axis].default
    ]
    extra = [f"{run['world']}ranks", f"acc{run['accumulation']}", run["model"]]
    return " ".join([*extra, *[f"dropout-{run['dropout']}"] * (run["dropout"] != "off"), *changed])


def configure(run: RunLayout) -> tuple[Config, list[Problem]]:
    """The configuration of a run, and every problem that the command line finds."""
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 4000}
    if run.get("offload") == "nvme":
        zero["offload_param"] = {"device": "nvme", "max_in_cpu": 0}
    thresholds = {"zero_optimization": zero, "aio": {"block_size": SMALLEST_SWAPPED}}
    words = [f"--{name.replace('_', '-')} {value}" for name, value in SHAPE.items()]
    words += [
        f"--deepspeed_config {ds_file(thresholds)} --data-path x --tokenizer-type NullTokenizer"
    ]
    words += [f"--train-iters {STEPS} --global-batch-size {SAMPLES_PER_STEP}"]
    words += [f"--micro-batch-size {_micro_batch_size(run)}"]
    for axis, value in run.items():
        flags = support_matrix.AXES[axis].values if axis in support_matrix.AXES else EXTRA[axis]
        on_disk = flags.get(value, "").replace("/tmp", str(folder() / "disk"))
        words += [on_disk, TEST_FLAGS.get((axis, value), "")]
    return build_config(
        " ".join(words).split(),
        world_size=int(run["world"]),
        warn=lambda _: None,
        complete=merge_file,
    )


def _micro_batch_size(run: RunLayout) -> int:
    replicas = max(int(run["world"]) // _ranks_of_a_replica(run), 1)
    return SAMPLES_PER_STEP // (replicas * int(run["accumulation"]))


def _ranks_of_a_replica(run: RunLayout) -> int:
    return math.prod(1 if run.get(axis, "1") == "1" else 2 for axis in SIZES)


def samples_of(run: RunLayout) -> Samples:
    return WITH_DOCUMENTS if run["documents"] == "on" else SAMPLES


def plans_of(run: RunLayout, config: Config) -> list[StepPlan]:
    return scheduled_plans(config, int(run["world"]), STEPS)


def reference_of(
    run: RunLayout, steps: int, replay: Replay | None = None, moved: int | None = None
) -> Run:
    """The first steps of one process without DeepSpeed, in fp32.

    Args:
        run: The layout.
        steps: Number of steps.
        replay: Decides as the run did. None: the reference decides.
        moved: As for `train_reference`.
    """
    names = ("model", "optimizer", "documents", "curriculum", "dropout", "schedule", "fp8")
    kept = {axis: run[axis] for axis in names}
    # Dropout masks, scales of fp8 and the load-balancing loss are those of a micro-batch.
    is_by_micro_batch = run["dropout"] != "off" or run["fp8"] != "off"
    size = _micro_batch_size(run) if is_by_micro_batch else None
    if run["experts"] != "none":
        kept["experts"] = "replicated"
        size = _micro_batch_size(run)
    # A replay is of one run, of which nothing is kept.
    train = _train_reference if replay is None else _train_reference.__wrapped__
    return train(tuple(kept.items()), size, steps, replay, moved)


@functools.cache
def _train_reference(
    values: tuple[tuple[str, str], ...],
    micro_batch_size: int | None,
    steps: int,
    replay: Replay | None,
    moved: int | None,
) -> Run:
    run = {axis: axis_.default for axis, axis_ in support_matrix.AXES.items()}
    run |= {"world": "1", "accumulation": "1", **dict(values)}
    config, problems = configure(run)
    assert problems == []
    plans = plans_of(run, config)[:steps]
    return train_reference(config, samples_of(run), plans, micro_batch_size, replay, moved=moved)


def has_decisions(run: RunLayout) -> bool:
    """Whether the reference takes over what the ranks decided."""
    return run["experts"] != "none" or run["dropout"] == "all"


def amplifies_rounding(run: RunLayout) -> bool:
    """Whether starts of one process that rounding moves are far apart after a step: Lion takes
    signs of gradients, and fp8 rounds to one of two neighbours that are far from each other."""
    return run["optimizer"] == "lion" and run["fp8"] != "off"


def is_accepted(run: RunLayout) -> bool:
    """Whether the matrix accepts a run, or a part of one, so far."""
    is_distributed = run.get("experts") == "distributed"
    has_copies = run.get("hpz", "1") != "1"
    copies = 2 if is_distributed or has_copies else 1
    if int(run.get("world", "4")) % (_ranks_of_a_replica(run) * copies):
        return False
    if any(values.items() <= run.items() for values in NOT_COMPARABLE):
        return False
    return not any(
        rule.values.keys() <= run.keys() and rule.forbids(run)
        for rule in (*support_matrix.RULES, *support_matrix.WITHOUT_EFFECT)
    )


Pair = frozenset[tuple[str, str]]
"""Two axes with a value of each."""


def pairs_of(run: RunLayout) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(run.items(), 2)}


def _completions(run: dict[str, str], missing: set[Pair]) -> Iterator[dict[str, str]]:
    """Accepted runs with these values; first those that greedily add the most missing pairs."""
    if not is_accepted(run):
        return
    axis = next((axis for axis in VALUES if axis not in run), None)
    if axis is None:
        yield run
        return

    def gain(value: str) -> int:
        return len({frozenset({item, (axis, value)}) for item in run.items()} & missing)

    for value in sorted(VALUES[axis], key=gain, reverse=True):
        yield from _completions({**run, axis: value}, missing)


@functools.cache
def covering() -> tuple[RunLayout, ...]:
    """Runs that have every accepted pair; the same ones in every session."""
    pairs = {
        frozenset({one: first, other: second}.items())
        for one, other in itertools.combinations(VALUES, 2)
        for first, second in itertools.product(VALUES[one], VALUES[other])
    }
    later = [{pair for pair in pairs if value in pair} for value in ADDED_LATER]
    runs = []
    for missing in (pairs.difference(*later), *later):
        while missing:
            start = min(missing, key=sorted)
            run = next(_completions(dict(start), missing), None)
            if run is None:
                missing.remove(start)
                continue
            runs.append({axis: run[axis] for axis in VALUES})
            missing -= pairs_of(run)
    return tuple(sorted(runs, key=lambda run: tuple(run.values())))


def basic() -> list[RunLayout]:
    """Runs of `covering` with what `make test` has, each the one with the most that is missing."""

    def parts(run: RunLayout) -> set[Pair | tuple[str, str]]:
        return {*run.items(), *pairs_of({axis: run[axis] for axis in BASIC})}

    left = list(covering())
    chosen = []
    missing = set[Any]().union(*map(parts, left))
    while missing:
        run = max(left, key=lambda run: len(parts(run) & missing))
        left.remove(run)
        missing -= parts(run)
        chosen.append(run)
    return chosen


def random_runs(seed: int, count: int, *, accepted: bool) -> list[RunLayout]:
    """Whole runs that hypothesis draws, all of which the matrix accepts, or any."""
    found: list[RunLayout] = []

    @strategies.composite
    def runs(draw: strategies.DrawFn) -> RunLayout:
        run: dict[str, str] = {}
        for axis in draw(strategies.permutations(list(VALUES))):
            # The ranks run those that are accepted.
            left_out = ON_DISK if accepted and WITHOUT_LIBAIO is not None else ()
            values = [
                value
                for value in VALUES[axis]
                if value not in left_out
                if not accepted or next(_completions({**run, axis: value}, set()), None)
            ]
            run[axis] = draw(strategies.sampled_from(values))
        return {axis: run[axis] for axis in VALUES}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(runs())
    def draw_all(run: RunLayout) -> None:
        found.append(run)

    draw_all()
    return found
