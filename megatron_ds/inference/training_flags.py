"""Flags of a training on the command line of a tool that takes its checkpoint.

Of the tokenizer they stand in for the training's, of the model they must agree with the checkpoint,
and the others have no effect. Also what such tools say, and how they end. Loads no torch before it
is asked for a checkpoint's tokenizer.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from megatron_ds import arguments, runtime
from megatron_ds.config import GROUPS, ModelConfig, RuntimeConfig, flag_of

if TYPE_CHECKING:
    from megatron_ds.checkpoint.found import Found
    from megatron_ds.tokenizer import Tokenizer

T = TypeVar("T")

ENDLESS_MINUTES = 60.0 * 24 * 365
"""The other ranks wait for what a person types."""
RUNTIME_FLAGS = ("distributed_backend", "distributed_timeout_minutes", "local_rank")
FREE_MODEL_FLAGS = ("attention_dropout", "hidden_dropout", "init_method_std")
"""Flags of the training that mean nothing here, so that any value agrees with the checkpoint."""


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


def load_problems(load: str | None, tp_size: int | None) -> Iterator[str]:
    """What is wrong with --load and --tensor-model-parallel-size."""
    if load is None:
        yield "--load is required"
    elif not Path(load).is_dir():
        yield f"--load {load}: there is no such folder"
    if tp_size not in (None, runtime.world_size()):
        yield (
            f"--tensor-model-parallel-size {tp_size}: all processes share the model, and "
            f"{runtime.world_size()} were started"
        )


def disagreements(given: dict[str, Any], model: ModelConfig, null_tokenizer: bool) -> Iterator[str]:
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


def tokenizer_for(flags: TrainingFlags, found: Found, program: str) -> Tokenizer:
    """The tokenizer, once flags and checkpoint agree; ends the program where they do not."""
    from megatron_ds.inference import load

    model = load.model_config(found)
    config = load.tokenizer_config(found, flags.of_group("tokenizer"))
    null_tokenizer = config.tokenizer_type == "NullTokenizer"
    problems = [
        *disagreements(flags.of_group("model"), model, null_tokenizer),
        *model.problems(runtime.world_size()),
        *config.problems(model.vocab),
    ]
    if problems:
        fail(program, problems)
    for warning in flags.warnings:
        say(f"WARNING: {warning}")
    if flags.without_effect:
        say(f"WARNING: no effect on generation: {', '.join(flags.without_effect)}")
    return load.load_tokenizer(config, model)


def of_first_rank(value: T) -> T:
    """The first rank's value, on every rank."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def say(text: str) -> None:
    """A line beside the output, by the first rank."""
    if runtime.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def fail(program: str, problems: Sequence[str]) -> NoReturn:
    """Names the problems on the first rank and ends the program with status 2."""
    problems = [line for problem in problems for line in problem.splitlines()]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  - {line}" for line in problems]
    say("\n".join([f"{program}: {count} with the settings:", *lines]))
    raise SystemExit(2)
