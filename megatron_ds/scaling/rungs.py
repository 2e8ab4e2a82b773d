"""A ladder of small runs that leads to a large one: their models, tokens, batches and schedules.

The models differ from the large one in what grows with it: the width, and with muP over depths the
number of layers. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.checks import divisors
from megatron_ds.config.options.schedule import SCHEDULE_LENGTHS
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.dataclass import dataclass
from megatron_ds.model.declaration.architecture import model_spec

GROWING = (
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
)
"""Sizes that grow with the width; those of attention heads stay, whose number grows."""
ROUNDED = 8
"""They are rounded to multiples of this."""
LAYOUT: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "ds_sequence_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
}
"""Layout of the small runs, which need no model parallelism."""
CHANGING = ("stages", "rampup_batch_size", "step_batch_size_schedule", "curriculum_seqlen")
"""Schedules in tokens or samples of the large run, which a small run cannot have."""
DEFAULT_RUNS = 4
LEAST_RUNS = 3
"""Sizes that a law by operations needs at least."""
DEFAULT_BUDGET = 0.01
"""Share of the operations of the large run."""
SIZE_FACTOR = 2.0
"""Ratio of the parameters of neighbouring sizes."""
BATCH_EXPONENT = 0.5
"""Power of the tokens with which the batch grows, as the critical batch size does (Zhang et al.
2024, arXiv 2410.21676, find 0.47)."""
EVALUATED = 0.05
"""Most samples of an evaluation, as a fraction of those that the smallest run trains on."""
LEAST_EVALUATED = 2**15
"""Tokens that an evaluation has anyway, unless that of the large run has fewer."""


@dataclass(frozen=True)
class Rung:
    """A run of the ladder, or the large run."""

    config: Config
    """Complete settings, with the size of the vocabulary."""
    samples: int
    """Samples per step."""
    steps: int

    @cached_property
    def parameters(self) -> int:
        """Parameters that multiply each token: without the embedding, with the output layer, of
        experts those that are selected. Six times this are the operations of a token, but for the
        scores of attention."""
        return model_spec(self.config.model, self.config.moe).flops(1) // 6

    @property
    def tokens(self) -> int:
        return self.steps * self.samples * self.config.model.seq_length

    @cached_property
    def sample_operations(self) -> int:
        """Operations of the training on a sample, without recomputation."""
        return model_spec(self.config.model, self.config.moe).flops(self.config.model.seq_length)

    @property
    def operations(self) -> int:
        """Operations of the training, without recomputation."""
        return self.steps * self.samples * self.sample_operations


@dataclass(frozen=True)
class LadderSettings:
    """What the sizes and lengths of the runs follow from."""

    runs: int = DEFAULT_RUNS
    """Number of sizes; fewer, at least `LEAST_RUNS`, if the budget does not suffice."""
    sizes: tuple[float, ...] = ()
    """Parameters of each size, instead of sizes by the budget."""
    budget: float | None = None
    """Operations of all runs; with `sizes` they determine the tokens. None: by `share`."""
    share: float | None = None
    """Operations of all runs as a fraction of the large run's. None: `DEFAULT_BUDGET`; with `sizes`
    no budget."""
    tokens_per_parameter: tuple[float, ...] = ()
    """Lengths of the runs of each size; empty: that of the large run."""
    batch_exponent: float = BATCH_EXPONENT
    size_factor: float = SIZE_FACTOR
    replicas: int = 1
    """Data-parallel processes of a run, by which its batch is divided."""
    seeds: int = 1
    """Runs of each size and length."""
    is_budget_raised: bool = False
    """Whether the smallest sizes are chosen where the budget suffices for none."""


@dataclass(frozen=True)
class Ladder:
    """The runs, the smallest first, and the large run that they lead to."""

    target: Rung
    rungs: tuple[Rung, ...] = field(default=())

    @property
    def operations(self) -> int:
        """Operations of all small runs."""
        return sum(rung.operations for rung in self.rungs)


def target_problems(config: Config) -> Iterator[Problem]:
    """Yields reasons that no ladder leads to a run.

    Args:
        config: Configuration of the large run without other problems.
    """
    for name in CHANGING:
        if getattr(config.schedule, name):
            yield Problem("ladder-of-changing-schedule", name)
    if _samples_of(config) is None:
        yield Problem("ladder-without-length", "train_tokens")
    if config.model.num_attention_heads <= LEAST_RUNS:
        yield Problem("ladder-of-few-heads", settings=config.model, least=LEAST_RUNS + 1)


def ladder_of(config: Config, settings: LadderSettings) -> Ladder:
    """Derives the ladder of a run.

    Args:
        config: Complete configuration of the large run, with the size of the vocabulary.
        settings: Sizes, tokens and budget.

    Raises:
        UserError: If the run has none, or the budget is too small for one.
    """
    if problems := list(target_problems(config)):
        raise UserError(*problems)
    samples = _samples_of(config)
    assert samples is not None
    batch = config.final_global_batch_size(1)
    target = Rung(config, batch, max(1, math.ceil(samples / batch)))
    models = [_narrow(config, heads) for heads in range(1, config.model.num_attention_heads)]
    sizes = [Rung(model, 1, 1) for model in models]
    ratios = settings.tokens_per_parameter or (target.tokens / target.parameters,)
    budget = settings.budget or (settings.share or DEFAULT_BUDGET) * target.operations
    if settings.sizes:
        chosen = _nearest(sizes, settings.sizes)
        if settings.budget or settings.share:
            factor = budget / _operations(chosen, ratios, target, settings)
            ratios = tuple(factor * ratio for ratio in ratios)
        return Ladder(target, _rungs(chosen, ratios, target, settings))
    for count in range(settings.runs, min(LEAST_RUNS, settings.runs) - 1, -1):
        for top in range(len(sizes), count - 1, -1):
            chosen = _descending(sizes[:top], count, settings.size_factor)
            if _operations(chosen, ratios, target, settings) <= 1.001 * budget:
                return Ladder(target, _rungs(chosen, ratios, target, settings))
    count = min(LEAST_RUNS, settings.runs)
    if settings.is_budget_raised:
        return Ladder(target, _rungs(sizes[:count], ratios, target, settings))
    least = _operations(sizes[:count], ratios, target, settings)
    raise UserError(
        Problem(
            "ladder-budget-too-small",
            budget=budget,
            count=count,
            least=least,
            share=math.ceil(1e4 * least / target.operations) / 1e4,
        )
    )


def _descending(sizes: list[Rung], count: int, factor: float) -> list[Rung]:
    """The largest of some sizes, and those below it by a factor; or the next smaller ones, where
    heads are too few for that."""
    wanted = [sizes[-1].parameters / factor**step for step in range(count)]
    chosen = _nearest(sizes, wanted)
    return chosen if len(chosen) == count else sizes[-count:]


def _samples_of(config: Config) -> int | None:
    """Samples of the complete run; None if its length is not known."""
    schedule = config.schedule
    if schedule.train_tokens:
        return -(-schedule.train_tokens // config.model.seq_length)
    batch = config.final_global_batch_size(1)
    samples = schedule.train_samples or (schedule.train_iters or 0) * batch
    return samples or None


def _nearest(sizes: Sequence[Rung], wanted: Sequence[float]) -> list[Rung]:
    """The model nearest to each number of parameters, each once, the smallest first."""
    chosen = {
        min(range(len(sizes)), key=lambda at: abs(math.log(sizes[at].parameters / parameters)))
        for parameters in wanted
    }
    return [sizes[index] for index in sorted(chosen)]


def _narrow(config: Config, heads: int) -> Config:
    """The large model with fewer heads, and the width, sizes and layers that belong to them."""
    model = config.model
    share = heads / model.num_attention_heads
    width = model.hidden_size * heads // model.num_attention_heads
    values: dict[str, Any] = dict(LAYOUT)
    values |= {"num_attention_heads": heads, "hidden_size": width}
    for name in GROWING:
        size = getattr(config.moe if hasattr(config.moe, name) else model, name)
        if size is not None and (name in config.given or name == "ffn_hidden_size"):
            values[name] = max(ROUNDED, ROUNDED * round(size * share / ROUNDED))
    if model.num_query_groups is not None:
        wanted = model.num_query_groups * share
        values["num_query_groups"] = min(divisors(heads), key=lambda size: abs(size - wanted))
    if model.has_depth_transfer:
        values["num_layers"] = max(1, round(model.num_layers * share))
    if model.use_mup and model.mup_base_hidden_size is None:
        values["mup_base_hidden_size"] = model.hidden_size
    return _with(config, values)


def _operations(
    sizes: Sequence[Rung], ratios: Sequence[float], target: Rung, settings: LadderSettings
) -> int:
    """Operations of all runs of some sizes."""
    lengths = (_length(size, ratio, target, settings) for size in sizes for ratio in ratios)
    models = (size for size in sizes for _ in ratios)
    pairs = zip(models, lengths, strict=True)
    return settings.seeds * sum(
        steps * samples * size.sample_operations for size, (_, samples, steps) in pairs
    )


def _rungs(
    sizes: Sequence[Rung], ratios: Sequence[float], target: Rung, settings: LadderSettings
) -> tuple[Rung, ...]:
    """Each size with each number of tokens per parameter."""
    rungs = []
    for size in sizes:
        for ratio in ratios:
            micro, samples, steps = _length(size, ratio, target, settings)
            config = _scheduled(size.config, target, micro, samples, steps)
            rungs.append(Rung(config, samples, steps))
    return _with_evaluation(rungs, target)


def _length(
    size: Rung, ratio: float, target: Rung, settings: LadderSettings
) -> tuple[int, int, int]:
    """Micro-batch size, samples per step and steps of a run."""
    tokens = ratio * size.parameters
    share = (tokens / target.tokens) ** settings.batch_exponent
    batch = max(1, round(target.samples * share / settings.replicas))
    micro = min(target.config.schedule.micro_batch_size, batch)
    samples = settings.replicas * micro * round(batch / micro)
    return micro, samples, max(1, round(tokens / (samples * target.config.model.seq_length)))


def _scheduled(config: Config, target: Rung, micro: int, samples: int, steps: int) -> Config:
    """A small model with its batch and length; warmup and decay are the same fractions."""
    schedule = config.schedule
    values: dict[str, Any] = {
        "micro_batch_size": micro,
        "global_batch_size": samples,
        "train_iters": steps,
        "train_samples": None,
        "train_tokens": None,
    }
    for stem in SCHEDULE_LENGTHS:
        for name in schedule.given_lengths(stem):
            value = getattr(schedule, name)
            unit = name.rpartition("_")[2]
            length = config.model.seq_length
            in_steps = {
                "iters": value,
                "samples": value / target.samples,
                "tokens": value / (target.samples * length),
            }
            fraction = in_steps[unit] / target.steps
            values[name] = 0 if name in ("lr_warmup_iters", "lr_warmup_samples") else None
            values[f"{stem}_iters"] = max(1, round(fraction * steps))
    return _with(config, values)


def _with_evaluation(rungs: Sequence[Rung], target: Rung) -> tuple[Rung, ...]:
    """The runs with an evaluation at their end alone, of about the same samples in all of them."""
    evaluation = target.config.evaluation
    smallest = min(rung.samples * rung.steps for rung in rungs)
    least = LEAST_EVALUATED / target.config.model.seq_length
    samples = min(evaluation.eval_iters * target.samples, max(EVALUATED * smallest, least))
    return tuple(
        replace(
            rung,
            config=_with(
                rung.config,
                {"eval_interval": None, "eval_iters": max(1, round(samples / rung.samples))},
            ),
        )
        for rung in rungs
    )


def _with(config: Config, values: dict[str, Any]) -> Config:
    """A copy with other values, as if flags had set them."""
    changed = config.with_values(values)
    return replace(changed, given=config.given | values.keys())
