"""The command line: flags derived from the configuration's fields, and nothing else.

Owns the spellings (dashes or underscores), the aliases, the flags of the peers that are accepted
without effect or refused, and the words of the errors. Knows no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ds import schedules
from megatron_ds.config import GROUPS, Config

FIXED_VALUES: dict[str, tuple[str, str | bool, str]] = {
    "swiglu": ("activation", "swiglu", "the same as --activation swiglu"),
    "openai-gelu": ("activation", "openai-gelu", "the same as --activation openai-gelu"),
    "squared-relu": ("activation", "squared-relu", "the same as --activation squared-relu"),
    "accumulate-allreduce-grads-in-fp32": (
        "accumulate_allreduce_grads_in_fp32",
        True,
        "the default",
    ),
    "no-position-embedding": (
        "position_embedding_type",
        "none",
        "the same as --position-embedding-type none",
    ),
    "use-rotary-position-embeddings": (
        "position_embedding_type",
        "rope",
        "the same as --position-embedding-type rope",
    ),
}
"""Flags without a value that stand for a value of a field: flag -> (field, value, help)."""

WITHOUT_EFFECT = {
    "attention-softmax-in-fp32": (0, "the attention kernel always keeps its softmax in fp32"),
    "no-masked-softmax-fusion": (0, "there is no masked-softmax kernel to turn off"),
    "no-bias-dropout-fusion": (0, "there is no bias-dropout kernel to turn off"),
    "no-pipeline-parallel": (0, "one pipeline stage is never run by the pipeline engine"),
    "no-query-key-layer-scaling": (0, "query-key layer scaling does not exist here"),
    "use-flash-attn": (0, "scaled_dot_product_attention takes the fastest kernel there is"),
    "use-flash-attn-v2": (0, "scaled_dot_product_attention takes the fastest kernel there is"),
    "DDP-impl": (1, "data parallelism is DeepSpeed's"),
    "use-cpu-initialization": (0, "weights are always drawn on the CPU, from one seed per name"),
    "dataloader-type": (1, "the order of the samples is a function of the seed"),
    "no-load-rng": (0, "random states are functions of the seed and the data's position"),
    "no-save-rng": (0, "random states are functions of the seed and the data's position"),
}
"""Flags of the peers that are read and dropped with a warning: flag -> (values, reason)."""

REFUSED = {
    "fp16-lm-cross-entropy": "the loss is computed in fp32; leave the flag out",
    "reset-position-ids": "positions run through a sample; leave the flag out",
    "reset-attention-mask": "attention runs through a sample; leave the flag out",
    "sequence-parallel": "sequence parallelism is not there yet; leave the flag out",
    "num-experts": "mixture of experts is not there yet; leave the flag out",
    "train-tokens": "give --train-samples (tokens / --seq-length)",
}
"""Flags of the peers that would change the run and are not supported: flag -> what to do."""


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are raised, so that they can be shown all together."""

    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(message)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """One spelling per flag in --help, and no default where there is none."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        options = list(action.option_strings)
        shown = [option for option in options if "_" not in option][:1] or options[:1]
        metavar = self._format_args(action, str(action.metavar or action.dest.upper()))
        return " ".join([*shown, metavar]).strip()


def spellings(flag: str) -> list[str]:
    """The accepted forms of a flag: as it is, with dashes, with underscores; longest first."""
    forms = (flag, flag.replace("_", "-"), flag.replace("-", "_"))
    return [f"--{form}" for form in dict.fromkeys(forms)]


def build_parser() -> argparse.ArgumentParser:
    """The parser of pretrain_gpt.py: a group of flags for each dataclass of the configuration."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT with DeepSpeed.",
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=True,
        argument_default=argparse.SUPPRESS,
    )
    for name, group in GROUPS.items():
        section = parser.add_argument_group(name, (group.__doc__ or "").strip().splitlines()[0])
        hints = typing.get_type_hints(group)
        for item in dataclasses.fields(group):
            _add(section, item, hints[item.name])
    section = parser.add_argument_group("other spellings")
    for flag, (field, value, words) in FIXED_VALUES.items():
        options = spellings(flag)
        section.add_argument(*options, dest=field, action="store_const", const=value, help=words)
    section.add_argument(
        *spellings("glu-activation"),
        dest="glu_activation",
        choices=("swiglu", "geglu", "reglu", "liglu"),
        help="--activation X with --ffn-hidden-size 4 x hidden, where that is not given",
    )
    section = parser.add_argument_group("without effect", "read and dropped with a warning")
    for flag, (values, reason) in WITHOUT_EFFECT.items():
        options = spellings(flag)
        if values:
            section.add_argument(*options, dest=f"dropped {flag}", metavar="X", help=reason)
        else:
            section.add_argument(*options, dest=f"dropped {flag}", action="store_true", help=reason)
    return parser


Complete = Callable[[Config, int], tuple[Config, list[str]]]
"""Fills a configuration in from elsewhere, given the number of processes, and names problems."""


def read(
    argv: Sequence[str],
    *,
    world_size: int,
    warn: Callable[[str], None],
    complete: Complete | None = None,
) -> tuple[Config | None, list[str]]:
    """The configuration of a command line, and every problem found (empty if the run can start).

    argv: the flags without the program's name. warn is called with one line per warning.
    complete: fills in what other sources than the flags say (the DeepSpeed file).
    """
    parser = build_parser()
    problems: list[str] = []
    try:
        space, unknown = parser.parse_known_args(list(argv))
    except ValueError as error:
        return None, [*_unknown_problems(parser, argv, known_only=False), str(error)]
    problems += _unknown_problems(parser, unknown, known_only=True)
    values = vars(space)
    for key in [key for key in values if key.startswith("dropped ")]:
        flag = key.removeprefix("dropped ")
        warn(f"--{flag} has no effect: {WITHOUT_EFFECT[flag][1]}")
        del values[key]
    glu = values.pop("glu_activation", None)
    if glu is not None:
        values["activation"] = glu
        if "ffn_hidden_size" not in values and "hidden_size" in values:
            values["ffn_hidden_size"] = 4 * values["hidden_size"]
    config = _config(values)
    if complete is not None:
        config, more = complete(config, world_size)
        problems += more
    problems += config.problems(world_size)
    if config.parallel.tensor_model_parallel_size > 0:
        problems += schedules.problems(config, config.parallel.data_parallel_size(world_size))
    return config, problems


def parse(
    argv: Sequence[str], *, world_size: int = 1, rank: int = 0, complete: Complete | None = None
) -> Config:
    """The configuration of a command line. Ends the program with status 2 after naming, on the
    first rank, every problem."""

    def warn(line: str) -> None:
        if rank == 0:
            print(f"WARNING: {line}", file=sys.stderr, flush=True)

    config, problems = read(argv, world_size=world_size, warn=warn, complete=complete)
    if problems:
        fail(problems, rank=rank)
    assert config is not None
    return config


def fail(problems: Sequence[str], *, rank: int = 0) -> typing.NoReturn:
    """Names the problems on the first rank and ends the program with status 2."""
    if rank == 0:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  - {problem}" for problem in problems)
        print(f"pretrain_gpt.py: {count} with the settings:\n{lines}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _config(values: dict[str, Any]) -> Config:
    groups = {}
    for name, group in GROUPS.items():
        names = {item.name for item in dataclasses.fields(group)}
        chosen = {key: values[key] for key in names & values.keys()}
        for key, value in chosen.items():
            if isinstance(value, list):
                chosen[key] = tuple(value)
        groups[name] = group(**chosen)
    return Config(**groups, given=frozenset(values))


def _add(section: argparse._ArgumentGroup, item: dataclasses.Field[Any], hint: Any) -> None:
    meta = item.metadata
    kind = _value_type(hint)
    options = _options(item)
    words = _help(item)
    if kind is bool:
        section.add_argument(
            *options,
            dest=item.name,
            action="store_const",
            const=item.default is not True,
            help=words,
        )
        return
    spelled = meta["values"]
    section.add_argument(
        *options,
        dest=item.name,
        type=(lambda text: spelled.get(text, text)) if spelled else kind,
        choices=meta["choices"],
        nargs=meta["nargs"],
        metavar=meta["metavar"] or _metavar(kind, meta["choices"]),
        help=words,
    )


def _options(item: dataclasses.Field[Any]) -> list[str]:
    name = item.name.replace("_", "-")
    negative = f"no-{name}" if item.default is True else name
    flags = [item.metadata["flag"] or negative, *item.metadata["aliases"]]
    return list(dict.fromkeys(form for flag in flags for form in spellings(flag)))


def _help(item: dataclasses.Field[Any]) -> str:
    words = str(item.metadata["help"]).replace("%", "%%")
    if item.default is None or isinstance(item.default, bool) or "(default" in words:
        return words
    return f"{words} (default: {item.default})"


def _metavar(kind: Any, choices: tuple[str, ...] | None) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _value_type(hint: Any) -> Any:
    """int, float, str or bool, out of `int | None` and `tuple[int, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint


def _unknown_problems(
    parser: argparse.ArgumentParser, words: Sequence[str], *, known_only: bool
) -> list[str]:
    """A line for each flag in `words` that the parser does not know, with the nearest name.

    known_only: the words are what the parser left over, so that a word without dashes is a stray
    value; otherwise they are the whole command line.
    """
    known = set(parser._option_string_actions)
    refused = {form: flag for flag in REFUSED for form in spellings(flag)}
    problems: list[str] = []
    for word in words:
        option = word.split("=", 1)[0]
        if not option.startswith("--"):
            if known_only and not problems:
                problems.append(f"{word!r} belongs to no flag")
            continue
        if option in refused:
            problems.append(f"{option} is not supported: {REFUSED[refused[option]]}")
        elif option not in known:
            dashed = option.replace("_", "-")
            near = difflib.get_close_matches(dashed, sorted(known), n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else " (--help lists the flags)"
            problems.append(f"there is no flag {option}{hint}")
    return problems
