"""Command lines of the tools that take a training's checkpoint: the flags that these tools share,
and what they make of the training's own flags.

Of those the tokenizer's stand in for what the checkpoint names, the model's must agree with it, and
the others have no effect. Also what such tools say, and how they end. Loads no torch before it is
asked for a checkpoint's tokenizer.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from megatron_ds.cli import arguments
from megatron_ds.cli.flags import spellings
from megatron_ds.config import GROUPS, ModelConfig, RuntimeConfig, flag_of
from megatron_ds.launch import environment

if TYPE_CHECKING:
    from megatron_ds.checkpoint.metadata import CheckpointMetadata
    from megatron_ds.tokenizer import Tokenizer

T = TypeVar("T")

ENDLESS_MINUTES = 60.0 * 24 * 365
"""The other ranks wait for what a person types."""
RUNTIME_FLAGS = ("distributed_backend", "distributed_timeout_minutes", "local_rank")
FREE_MODEL_FLAGS = ("attention_dropout", "hidden_dropout", "init_method_std")
"""Flags of the training that mean nothing here, so that any value agrees with the checkpoint."""


PRECISIONS = ("fp32", "bf16", "fp16")


class FlagGroup(Protocol):
    """A group of flags of a tool's parser."""

    def add_argument(self, *names: str, **options: Any) -> Any: ...


class SamplingDefaults(Protocol):
    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...


def add_flag(group: FlagGroup, flag: str, *more: str, **options: Any) -> None:
    """A flag and its aliases, in all their spellings."""
    names = [form for name in (flag, *more) for form in spellings(name)]
    group.add_argument(*dict.fromkeys(names), dest=flag.replace("-", "_"), **options)


def add_model_flags(group: FlagGroup) -> None:
    """Which checkpoint, on how many processes, in which numbers."""
    add_flag(
        group,
        "load",
        metavar="FOLDER",
        help="--save folder of a training (its newest checkpoint), or one of its checkpoints",
    )
    add_flag(
        group,
        "tensor-model-parallel-size",
        "model-parallel-size",
        type=int,
        metavar="N",
        help="processes that share the model, not necessarily as many as in the training "
        "(default: all that were started)",
    )
    for name in PRECISIONS:
        add_flag(
            group, name, action="store_true", help=f"compute in {name}, not in the training's type"
        )


def add_sampling_flags(group: FlagGroup, default: SamplingDefaults) -> None:
    """How a token is drawn."""
    add_flag(
        group,
        "temperature",
        type=float,
        default=default.temperature,
        metavar="X",
        help="below 1: more probable tokens more often (default: %(default)s)",
    )
    add_flag(
        group,
        "top-k",
        type=int,
        default=default.top_k,
        metavar="N",
        help="draw from the N most probable tokens; 0 is off (default: %(default)s)",
    )
    add_flag(
        group,
        "top-p",
        type=float,
        default=default.top_p,
        metavar="X",
        help="draw from the fewest tokens with together this probability; 0 is off (default: "
        "%(default)s)",
    )


def requested_dtype(args: object) -> str | None:
    """What the model is to compute in; None for the training's type."""
    return next((name for name in PRECISIONS if getattr(args, name)), None)


@dataclass(frozen=True)
class TrainingFlags:
    """The flags of pretrain_gpt.py that were given, by field."""

    values: dict[str, Any]
    warnings: tuple[str, ...] = ()

    def of_group(self, group: str) -> dict[str, Any]:
        names = {item.name for item in dataclasses.fields(GROUPS[group])}
        return {name: value for name, value in self.values.items() if name in names}

    @property
    def without_effect(self) -> list[str]:
        read = {*self.of_group("model"), *self.of_group("tokenizer"), *RUNTIME_FLAGS}
        return sorted(flag_of(name) for name in self.values if name not in read)

    def runtime_config(self, *, endless: bool) -> RuntimeConfig:
        """endless: ranks that wait for each other do so for ever, unless a flag says otherwise."""
        known = {name: self.values[name] for name in RUNTIME_FLAGS if name in self.values}
        if endless:
            known.setdefault("distributed_timeout_minutes", ENDLESS_MINUTES)
        return RuntimeConfig(**known)


def read(words: Sequence[str], own: Iterable[str]) -> tuple[TrainingFlags, list[str]]:
    """The flags among the words that a tool's own parser left over, and every problem.

    own: names of the tool's flags, for the hint at a typing error.
    """
    said = arguments.scan(words, also=own)
    return TrainingFlags(said.values, tuple(said.warnings)), said.problems


def model_problems(args: Any) -> Iterator[str]:
    """What is wrong with the flags of `add_model_flags`, as the parser read them."""
    load, tp_size = args.load, args.tensor_model_parallel_size
    if load is None:
        yield "--load is required"
    elif not Path(load).is_dir():
        yield f"--load {load}: there is no such folder"
    if tp_size not in (None, environment.world_size()):
        yield (
            f"--tensor-model-parallel-size {tp_size}: all processes share the model, and "
            f"{environment.world_size()} were started"
        )
    if sum(getattr(args, name) for name in PRECISIONS) > 1:
        yield "--fp32, --bf16 and --fp16 exclude each other"


def model_conflicts(
    given: dict[str, Any], model: ModelConfig, null_tokenizer: bool
) -> Iterator[str]:
    """The model flags that differ from the checkpoint's model."""
    effective = {
        "ffn_hidden_size": model.ffn,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.positions,
        "group_query_attention": model.kv_heads != model.heads,
        # A NullTokenizer's end-of-document id comes on top of the flag's number.
        "vocab_size": model.vocab - null_tokenizer,
    }
    for name, value in given.items():
        saved = effective.get(name, getattr(model, name))
        if value != saved and name not in FREE_MODEL_FLAGS:
            yield (
                f"{flag_of(name)} is {value}, in the checkpoint {saved} (leave the flag out: the "
                "checkpoint knows its model)"
            )


def tokenizer_for(flags: TrainingFlags, found: CheckpointMetadata, program: str) -> Tokenizer:
    """The tokenizer, once flags and checkpoint agree; ends the program where they do not."""
    from megatron_ds.inference import load_checkpoint

    model = load_checkpoint.model_config(found)
    config = load_checkpoint.tokenizer_config(found, flags.of_group("tokenizer"))
    null_tokenizer = config.tokenizer_type == "NullTokenizer"
    problems = [
        *model_conflicts(flags.of_group("model"), model, null_tokenizer),
        *model.problems(environment.world_size()),
        *config.problems(model.vocab),
    ]
    if problems:
        fail(program, problems)
    for warning in flags.warnings:
        say(f"WARNING: {warning}")
    if flags.without_effect:
        say(f"WARNING: no effect on generation: {', '.join(flags.without_effect)}")
    return load_checkpoint.load_tokenizer(config, model)


def broadcast_from_rank0(value: T) -> T:
    """The first rank's value, on every rank."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def say(text: str) -> None:
    """A line beside the output, by the first rank."""
    if environment.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def fail(program: str, problems: Sequence[str]) -> NoReturn:
    """Names the problems on the first rank and ends the program with status 2."""
    problems = [line for problem in problems for line in problem.splitlines()]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  - {line}" for line in problems]
    say("\n".join([f"{program}: {count} with the settings:", *lines]))
    raise SystemExit(2)
