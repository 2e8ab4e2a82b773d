"""Why a speed certificate is not accepted: its schema, and figures that cannot be.

A rate is compared with the data sheet of the device, a speed with the measured rate of products.
Everything that a complete measurement has must be there: all collectives in all groups, the losses
of all layouts, and the speeds of all sizes.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.accelerator.models import SIZES
from benchmarks.accelerator.processes import Row

if TYPE_CHECKING:
    from megatron_ds.planning.hardware import Hardware

FORMAT = 1
MOST_RANKS = 8
MEASURED = ("124m", "345m", "1.3b", "llama-0.5b")
"""Sizes whose speed is measured."""
TINY_SIZES = ("tiny", "tiny-llama")
"""Sizes that try the program on a CPU."""
SMALL_GIB = 40.0
"""Memory of a device below which sizes may be missing, except the first one."""
HOST = "cpu"
"""The name that a device without a data sheet has."""
LOSSES = 4
"""Steps of the run of a layout."""
VOCABULARY = 256
"""Ids of these runs, whose first loss is about the logarithm of it."""
TOLERANCE = 1e-5
"""Largest relative difference of a loss in fp32 between layouts; the same layout has equal bits."""
SLACK = 1.02
"""Measured rates may exceed the ones that bound them by this factor."""
MEMORY_SLACK = 1.1
"""The same for memory, of which data sheets round the size."""
NUMBER = (float, int)
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "date": str,
    "commit": str,
    "device": str,
    "ranks": int,
    "versions": dict,
    "versions.torch": str,
    "versions.deepspeed": str,
    "rates.bf16_tflops": NUMBER,
    "rates.copy_tb_s": NUMBER,
    "links": dict,
    "collectives": list,
    "layouts": list,
    "speeds": list,
}
"""Keys of a file, joined by points, and the types of their values."""
LINK_SCHEMA: dict[str, type | tuple[type, ...]] = {
    "links.bytes": int,
    "links.gb_s": NUMBER,
    "links.latency_s": NUMBER,
}
"""The same for several ranks."""
ROWS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "collectives": {"layout": dict, "axis": str, "operation": str, "ranks": int, "passed": bool},
    "layouts": {"name": str, "losses": list},
    "speeds": {
        "size": str,
        "micro_batch": int,
        "seconds": NUMBER,
        "tokens_per_second": NUMBER,
        "planned_after": NUMBER,
    },
}
"""The same for the rows of lists."""


def layouts(ranks: int) -> dict[str, dict[str, object]]:
    """Flags of the runs whose losses are compared, by name. The first one is repeated."""
    cases: dict[str, dict[str, object]] = {"data parallel": {"zero_stage": 1}}
    cases["the same again"] = {"zero_stage": 1}
    if ranks > 1:
        cases["ZeRO 2"] = {"zero_stage": 2}
        cases["ZeRO 3"] = {"zero_stage": 3}
    if ranks % 2 == 0:
        for name in ("tensor", "pipeline"):
            cases[f"{name} parallel"] = {f"{name}_model_parallel_size": 2}
        cases["sequence parallel"] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        cases["Ulysses"] = {"ds_sequence_parallel_size": 2}
        cases["context parallel"] = {"context_parallel_size": 2}
    return cases


def hardware_of(name: str) -> Hardware | None:
    """The devices that a plan knows by a device's name; None if it knows none.

    Its name, such as NVIDIA GeForce RTX 4090, contains the one that hardware.toml has.
    """
    from megatron_ds.planning.hardware import HARDWARE

    for kind, device in HARDWARE.items():
        pattern = re.sub(r"(?<=[a-z])(?=\d)", " ?", kind) + r"(?!\d)"
        if kind != HOST and re.search(pattern, name, re.IGNORECASE):
            return device
    return None


def problems(values: object) -> list[str]:
    """Why the content of a file is not accepted; empty if it is."""
    if not isinstance(values, Mapping):
        return ["it is no object"]
    found = list(_schema_problems(values))
    if found:
        return found
    tiny = {row["size"] for row in values["speeds"]} <= set(TINY_SIZES)
    found = [*head_problems(values, tiny=tiny), *_rate_problems(values)]
    found += _collective_problems(values)
    found += _loss_problems(values["layouts"], values["ranks"])
    found += _size_problems(values)
    for row in values["speeds"]:
        found += _speed_problems(row, values)
    return found


def damage(values: object) -> list[str]:
    """Why a measurement cannot continue a file; empty if it can. Parts may be missing."""
    if not isinstance(values, Mapping):
        return ["it is no object"]
    started = {"rates": {"bf16_tflops": 1, "copy_tb_s": 1}, "collectives": []}
    links = {"bytes": 1, "gb_s": 1, "latency_s": 1}
    has_links = values.get("links", {}) != {}
    return list(_schema_problems({**started, **values, **({} if has_links else {"links": links})}))


def all_passed(values: Mapping[str, Any]) -> bool:
    """Whether there are collectives, which one rank does not need, and all of them passed."""
    rows = values["collectives"]
    return all(row["passed"] is True for row in rows) and (bool(rows) or values["ranks"] == 1)


def _schema_problems(values: Mapping[str, Any]) -> Iterator[str]:
    schema = {**SCHEMA, **({} if values.get("ranks") == 1 else LINK_SCHEMA)}
    for key, kinds in schema.items():
        yield from _type_problems(values, key, kinds)
    for name, columns in ROWS.items():
        rows = values.get(name)
        for position, row in enumerate(rows if isinstance(rows, list) else ()):
            title = f"{name}.{position}"
            if not isinstance(row, Mapping):
                yield f"{title}: {row!r} is no object"
            elif row.get("passed") is not False:  # of a failure nothing else is known
                for key, kinds in columns.items():
                    yield from _type_problems(row, key, kinds, f"{title}.")


def _type_problems(
    values: Mapping[str, Any], key: str, kinds: type | tuple[type, ...], prefix: str = ""
) -> Iterator[str]:
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        yield f"{prefix}{key}: missing"
    elif not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        names = " or ".join(
            kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
        )
        yield f"{prefix}{key}: {value!r} is no {names}"
    elif isinstance(value, int | float) and kinds is not bool and not 0 < value < math.inf:
        yield f"{prefix}{key}: {value!r} is no positive number"


def head_problems(values: Mapping[str, Any], *, tiny: bool) -> Iterator[str]:
    """Why no measurement with the head of a file is accepted, which is known before it starts.

    Args:
        values: Format, date, commit, device and ranks.
        tiny: Whether tiny models are measured, on a device that may be unknown.
    """
    if values["format"] != FORMAT:
        yield f"format: {values['format']} is not {FORMAT}"
    if not 0 < values["ranks"] <= MOST_RANKS:
        yield f"ranks: {values['ranks']} are not 1 to {MOST_RANKS}, as a machine has"
    try:
        date = datetime.date.fromisoformat(values["date"])
        if date > datetime.date.today() + datetime.timedelta(days=1):
            yield f"date: {date} is in the future"
    except ValueError:
        yield f"date: {values['date']!r} is not of the form YYYY-MM-DD"
    if not re.fullmatch(r"[0-9a-f]{7,40}", values["commit"]):
        yield f"commit: {values['commit']!r} is no revision of a git checkout"
    if not tiny and hardware_of(values["device"]) is None:
        yield f"device: no data sheet of {values['device']!r} is known: add it to hardware.toml"


def _rate_problems(values: Mapping[str, Any]) -> Iterator[str]:
    device = hardware_of(values["device"])
    if device is None:
        return
    rates = values["rates"]
    limits = {
        "rates.bf16_tflops": (rates["bf16_tflops"], device.tflops_16),
        "rates.copy_tb_s": (rates["copy_tb_s"], device.memory_rate / 1e12),
        "links.gb_s": (values["links"].get("gb_s", 0.0), device.inside / 1e9),
    }
    for key, (rate, limit) in limits.items():
        if rate > SLACK * limit:
            yield f"{key}: {rate:.4g} is more than the {limit:.4g} of a {device.name}"
    limit = device.memory / 2**30
    if _memory_gib(values) > MEMORY_SLACK * limit:
        memory = rates.get("memory_gib")
        yield f"rates.memory_gib: {memory!r} is not the {limit:.0f} of a {device.name}, or less"


def _memory_gib(values: Mapping[str, Any]) -> float:
    """The memory of a device; infinite if it is not a number, which no device with memory has."""
    memory = values["rates"].get("memory_gib")
    is_number = isinstance(memory, NUMBER) and not isinstance(memory, bool) and memory > 0
    return float(memory) if is_number else math.inf


def _collective_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Failures, or what of all groups and operations is missing."""
    from benchmarks.accelerator.collectives import OPERATIONS, groups_of

    if not all_passed(values):
        yield "collectives: not all passed, or there are none"
        return
    measured = {
        (str(sorted(row["layout"].items())), row["axis"], row["operation"])
        for row in values["collectives"]
    }
    groups = groups_of(values["ranks"]) if values["ranks"] <= MOST_RANKS else ()
    for sizes, axis, _ in groups:
        key = str(sorted(sizes.items())), axis
        if missing := [name for name in OPERATIONS if (*key, name) not in measured]:
            yield f"collectives: {', '.join(missing)} missing over {axis} of {sizes}"


def _loss_problems(rows: Sequence[Row], ranks: int) -> Iterator[str]:
    by_name = {row["name"]: row["losses"] for row in rows}
    missing = [name for name in layouts(ranks) if name not in by_name]
    if missing or len(by_name) != len(rows):
        yield f"layouts: {', '.join(missing) or 'a name'} missing, or twice"
        return
    first = by_name["data parallel"]
    for name, losses in by_name.items():
        tolerance = 0.0 if name == "the same again" else TOLERANCE
        if len(losses) != LOSSES or not all(map(_is_loss, losses)):
            yield f"layouts, {name}: {losses} are no {LOSSES} losses"
        elif len(losses) == len(first) and all(map(_is_loss, first)):
            pairs = zip(losses, first, strict=True)
            if not all(abs(a - b) <= tolerance * abs(b) for a, b in pairs):
                yield f"layouts, {name}: the losses {losses} differ from {first}"


def _is_loss(value: object) -> bool:
    """Whether a value can be a loss of the first steps: near that of equal probabilities."""
    expected = math.log(VOCABULARY)
    return isinstance(value, float) and abs(value - expected) <= 0.1 * expected


def _size_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Sizes that are missing, unknown or there twice."""
    names = [row["size"] for row in values["speeds"]]
    expected = TINY_SIZES if names and set(names) <= set(TINY_SIZES) else MEASURED
    for name in dict.fromkeys(names):
        if name not in expected:
            yield f"speeds, {name}: no size of a certificate ({', '.join(expected)})"
        elif names.count(name) > 1:
            yield f"speeds, {name}: there are several"
    needed = expected if _memory_gib(values) >= SMALL_GIB else expected[:1]
    if missing := [name for name in needed if name not in names]:
        yield f"speeds: {', '.join(missing)} missing; the same command measures what is missing"


def _speed_problems(row: Row, values: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a speed; a causal kernel computes half of the scores."""
    title = f"speeds, {row['size']}"
    size = SIZES.get(row["size"])
    if size is None:
        return
    ranks = values["ranks"]
    micro_batch = row["micro_batch"]
    seconds = row["seconds"]
    if micro_batch not in size.micro_batches:
        yield f"{title}: micro-batches of {micro_batch} are none of {size.micro_batches}"
    tokens = micro_batch * size.sequence * ranks
    if not math.isclose(tokens / seconds, row["tokens_per_second"], rel_tol=0.01):
        yield f"{title}: {tokens} tokens in {seconds} s are not {row['tokens_per_second']}/s"
    flops = size.flops_per_token(is_causal=True) * tokens
    floor = flops / (ranks * values["rates"]["bf16_tflops"] * 1e12)
    if seconds * SLACK < floor:
        yield f"{title}: {seconds:.4g} s, but its products alone take {floor:.4g} s"
    peak = row.get("peak_bytes")
    limit = MEMORY_SLACK * _memory_gib(values) * 2**30
    if peak is not None and not (isinstance(peak, NUMBER) and 0 < peak <= limit):
        yield f"{title}: peak_bytes {peak!r} are not in the memory of the device"
