"""muP of other programs' commands, in the flags of muP here, and what differs.

Facts are from bigscience's fork with muP (TevenLeScao/Megatron-DeepSpeed, branch mup_integration,
commit 13f39b0c of 2023-02-22) and from Megatron-LM's pull requests 4381 and 4998 of May 2026. Knows
no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ds.cli.doctor.frameworks import TrainingCommand
from megatron_ds.cli.doctor.trainers.settings import text_of
from megatron_ds.cli.flags import dashed, training_flags
from megatron_ds.cli.scan import scan

SWITCH = "mup"
"""Switch of bigscience's fork."""
FACTORS: Mapping[str, float] = {
    "mup-input-mult": 1,
    "mup-output-mult": 1,
    "mup-attn-mult": 1,
    "mup-base-hidden-size": 64,
    "mup-base-ffn-hidden-size": 256,
}
"""Its other flags, with their defaults."""
DOUBLED = 2
"""Its base model is the larger one of the two whose shapes it compares, with twice these sizes."""
RECIPE = "scaling-recipe"
RECIPES: Mapping[str, Sequence[str]] = {
    "none": (),
    "mup": ("--use-mup",),
    "depth_mup": ("--use-mup", "--mup-independent-weight-decay"),
}
"""Recipes of the pull requests, as flags here."""
RENAMED = {
    "scaling-base-hidden-size": "mup-base-hidden-size",
    "scaling-base-head-dim": "mup-base-head-dim",
    "scaling-base-num-layers": "mup-base-num-layers",
}


def with_transfer(command: TrainingCommand) -> TrainingCommand:
    """A command with the flags of muP here in the place of another program's.

    A command whose flags cannot be translated stays as it is; pretrain_gpt.py refuses them by name.
    """
    values: Mapping[str, Any] = scan(list(command.flags), training_flags()).values
    if values.get("use_mup"):
        return command
    rest, words = _split(command.flags, (SWITCH, *FACTORS))
    try:
        if words.get(SWITCH, [None]) == []:
            values_of = {name: float(words[name][0]) for name in words if name != SWITCH}
            factors = {**FACTORS, **values_of}
            return _of_bigscience(command, rest, factors, values)
        rest, words = _split(command.flags, (RECIPE, *RENAMED))
        if RECIPE in words:
            return _of_recipe(command, rest, words, values)
    except (ValueError, KeyError, IndexError):  # a value or a size that is not known
        pass
    return command


def _split(flags: Sequence[str], names: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The flags without the ones of some names, and the values of these."""
    rest: list[str] = []
    words: dict[str, list[str]] = {}
    target = rest
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            key = dashed(name.removeprefix("--"))
            target = rest
            if key in names:
                target = [value] if equals else []
                words[key] = target
                continue
        target.append(word)
    return rest, words


def _of_bigscience(
    command: TrainingCommand,
    rest: Sequence[str],
    factors: Mapping[str, float],
    values: Mapping[str, Any],
) -> TrainingCommand:
    """The command of bigscience's fork with its muP.

    Args:
        command: The command.
        rest: Its flags without those of muP.
        factors: The values of `FACTORS`.
        values: Values by field of the flags that this program has.

    Raises:
        KeyError: If the hidden size or the number of layers is not known.
    """
    hidden = int(values["hidden_size"])
    base = DOUBLED * int(factors["mup-base-hidden-size"])
    m = hidden / base
    logits = factors["mup-output-mult"] / hidden
    words = ["--use-mup", "--mup-base-hidden-size", str(base), "--mup-independent-weight-decay"]
    if factors["mup-input-mult"] != 1:
        words += ["--mup-embedding-mult", text_of(factors["mup-input-mult"])]
    if factors["mup-attn-mult"] != 1:
        words += ["--mup-base-head-dim", text_of(factors["mup-attn-mult"] ** 2)]
    lacking: list[str] = []
    if logits == 1 != m:
        lacking.append(
            f"--mup-output-mult {hidden}: the factor of the logits is 1 there, and "
            "--mup-output-mult 1 means base / hidden size here; choose another value"
        )
    elif logits != 1 / m:
        words += ["--mup-output-mult", text_of(logits)]
    differences = _of_the_fork(factors, values, m, is_pipeline="--deepspeed" in rest)
    return dataclasses.replace(
        command,
        flags=[*rest, *words],
        differences=[*command.differences, *differences],
        lacking=[*command.lacking, *lacking],
    )


def _of_the_fork(
    factors: Mapping[str, float], values: Mapping[str, Any], m: float, *, is_pipeline: bool
) -> list[str]:
    """What muP of bigscience's fork does otherwise, at m times the width of its base model."""
    layers = values["num_layers"]
    std = float(values.get("init_method_std", 0.02)) / m**0.5
    differences = [
        f"--mup: initial weights before the residual connections have std {std:.4g} there; here "
        f"{std / (2 * layers) ** 0.5:.4g}, divided by sqrt(2 x layers)",
        f"--mup: Adam's epsilon is --adam-eps of all weights there; here {1 / m:.4g} of it for "
        "matrices of layers",
    ]
    ranks = values.get("tensor_model_parallel_size", 1)
    if ranks > 1:
        differences.append(
            f"--mup with {ranks} tensor-parallel ranks: the rate of queries, keys and values is "
            f"divided by {m / ranks:.4g} there, since the heads of its base model are as many as "
            f"ranks; here by {m:.4g}"
        )
    inner = values.get("ffn_hidden_size") or 4 * values["hidden_size"]
    ratio = inner / (DOUBLED * factors["mup-base-ffn-hidden-size"])
    if ratio != m:
        differences.append(
            f"--mup-base-ffn-hidden-size {factors['mup-base-ffn-hidden-size']:g}: the rate of the "
            f"matrix into the feed-forward layer is divided by {ratio:.4g} there; here by {m:.4g}"
        )
    if not is_pipeline:
        differences.append(
            "--mup without --deepspeed: --mup-input-mult and --mup-output-mult have no effect "
            "there; here they have"
        )
    if values.get("embed_layernorm"):
        differences.append(
            "--mup with --embed-layernorm: the weight of this norm is drawn around 0 there; here "
            "it begins with 1"
        )
    return differences


def _of_recipe(
    command: TrainingCommand,
    rest: Sequence[str],
    words: Mapping[str, Sequence[str]],
    values: Mapping[str, Any],
) -> TrainingCommand:
    """The command of a recipe of Megatron-LM's pull requests.

    Raises:
        KeyError: If the recipe is not known.
    """
    (recipe,) = words[RECIPE]
    added = list(RECIPES[recipe])
    for theirs, ours in RENAMED.items():
        is_used = recipe == "depth_mup" or (recipe == "mup" and theirs != "scaling-base-num-layers")
        if is_used and theirs in words:
            added += [f"--{ours}", *words[theirs]]
    differences = list(command.differences)
    if recipe == "depth_mup" and not values.get("disable_bias_linear"):
        differences.append(
            "--scaling-recipe depth_mup: biases of linear layers are decayed there; here no bias is"
        )
    return dataclasses.replace(command, flags=[*rest, *added], differences=differences)
