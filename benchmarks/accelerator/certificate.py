"""A speed certificate: what the devices of one machine compute and send, in one JSON file.

Parts are measured one after the other, and the file is written after each, so that the same command
continues where it ended. `problems` says why a file is not accepted: values that are missing or of
another type, and figures that cannot be, such as more tokens per second than the products of the
device allow.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.accelerator import train
from benchmarks.accelerator.models import SIZES, GptSize
from benchmarks.accelerator.processes import (
    REPOSITORY,
    Row,
    budget,
    flags,
    random_tokens,
    read_json,
    run,
)
from benchmarks.common import write_json

if TYPE_CHECKING:
    from megatron_ds.planning.hardware import Hardware
    from megatron_ds.planning.plan import Plan

HERE = Path(__file__).resolve().parent
FOLDER = REPOSITORY / "benchmarks" / "certificates"
FORMAT = 1
MEASURED = ("124m", "345m", "1.3b", "llama-0.5b")
"""Sizes whose speed is measured."""
TINY_SIZES = ("tiny", "tiny-llama")
DEVICES = {"H200": "h200", "H100": "h100", "A100": "a100", "MI300X": "mi300x"}
"""Part of a device's name -> --hardware."""
TOLERANCE = 1e-5
"""Largest relative difference of a loss in fp32 between layouts; the same layout has equal bits."""
SLACK = 1.02
"""Measured rates may exceed the ones that bound them by this factor."""
TINY_RUN: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "train_iters": 4,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "log_interval": 1,
    "eval_iters": 0,
    "no_compile": True,
}
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "date": str,
    "commit": str,
    "device": str,
    "ranks": int,
    "versions": dict,
    "rates.bf16_tflops": float,
    "rates.copy_tb_s": float,
    "links": dict,
    "collectives": list,
    "layouts": list,
    "speeds": list,
}
"""Keys of a file, joined by points, and the types of their values."""
SPEED_KEYS = ("size", "micro_batch", "seconds", "tokens_per_second", "planned", "planned_after")


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


def measure(path: Path, ranks: int, measured: Mapping[str, Any], *, tiny: bool) -> Iterator[Row]:
    """Measure the parts that a file lacks, and write it after each.

    Args:
        path: The file.
        ranks: Devices that are used.
        measured: Name, memory and rates of a device, versions.
        tiny: Measure tiny models, on a CPU.
    """
    values = read_json(path) if path.exists() else {}
    head = {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "device": measured["device"],
        "ranks": ranks,
        "versions": measured["versions"],
    }
    same = ("format", "commit", "device", "ranks")
    if any(values.get(key) != head[key] for key in same):
        values = {**head, "rates": dict(measured["rates"]), "speeds": [], "layouts": []}
        _write(path, values)
    if not ("collectives" in values and _all_passed(values)) and budget.left:
        values |= _collectives(ranks, tiny)
        _write(path, values)
        yield {
            "name": "collectives",
            "passed": _all_passed(values),
            "count": len(values["collectives"]),
        }
    for name, more in layouts(ranks).items():
        if all(row["name"] != name for row in values["layouts"]) and budget.left:
            found = {"name": name, **_losses(more, ranks)}
            if found["losses"]:
                values["layouts"].append(found)
                _write(path, values)
            yield {**found, "passed": bool(found["losses"])}
    for name in TINY_SIZES if tiny else MEASURED:
        if all(row["size"] != name for row in values["speeds"]) and budget.left:
            row = _speed(name, ranks, values, tiny=tiny)
            if "tokens_per_second" in row:
                values["speeds"].append(row)
                _write(path, values)
            yield {"name": name, **row, "passed": "tokens_per_second" in row}
    for text in problems(values):
        yield {"name": text, "passed": False}


def lines(row: Row) -> Iterator[str]:
    """Format the outcome of a part."""
    text = f"{row['name']:20}{'passed' if row['passed'] else 'FAILED'}"
    if "tokens_per_second" in row:
        planned = f"planned {row['planned']:,.0f}" if row["planned"] else "no plan for this device"
        text += f"  {row['tokens_per_second']:,.0f} tokens/s, {planned}, "
        text += f"{row['planned_after']:,.0f} with the measured rates"
    yield text


def problems(values: Mapping[str, Any]) -> list[str]:
    """Why a file is not accepted; empty if it is."""
    found = [text for key, kinds in SCHEMA.items() if (text := _type_problem(values, key, kinds))]
    if found:
        return found
    device = hardware_of(values["device"])
    product = values["rates"]["bf16_tflops"]
    if device is not None:
        limits = {
            "rates.bf16_tflops": (product, device.tflops_16),
            "rates.copy_tb_s": (values["rates"]["copy_tb_s"], device.memory_rate / 1e12),
            "links.gb_s": (values["links"].get("gb_s", 0.0), device.inside / 1e9),
        }
        for key, (rate, limit) in limits.items():
            if rate > SLACK * limit:
                found.append(f"{key}: {rate:.4g} is more than the {limit:.4g} of a {device.name}")
    if not _all_passed(values):
        found.append("collectives: not all passed, or there are none")
    found += _loss_problems(values["layouts"])
    for row in values["speeds"]:
        found += _speed_problems(row, values["ranks"], product)
    return found


def _type_problem(values: Mapping[str, Any], key: str, kinds: type | tuple[type, ...]) -> str:
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if not isinstance(value, kinds) or isinstance(value, bool):
        return f"{key}: {value!r} is not of type {kinds}"
    if isinstance(value, float) and not (math.isfinite(value) and value > 0):
        return f"{key}: {value!r} is no positive number"
    return ""


def _all_passed(values: Mapping[str, Any]) -> bool:
    rows = values["collectives"]
    return all(row["passed"] for row in rows) and (bool(rows) or values["ranks"] == 1)


def _loss_problems(rows: list[Row]) -> Iterator[str]:
    by_name = {row["name"]: row["losses"] for row in rows}
    first = by_name.get("data parallel")
    if not first:
        yield "layouts: there are no losses"
        return
    for name, losses in by_name.items():
        tolerance = 0.0 if name == "the same again" else TOLERANCE
        pairs = list(zip(losses, first, strict=False))
        if len(losses) != len(first):
            yield f"layouts, {name}: {len(losses)} losses instead of {len(first)}"
        elif not all(abs(a - b) <= tolerance * abs(b) for a, b in pairs):
            yield f"layouts, {name}: the losses {losses} differ from {first}"


def _speed_problems(row: Row, ranks: int, product: float) -> Iterator[str]:
    """Problems of a speed; a causal kernel computes half of the scores."""
    title = f"speeds, {row.get('size')}"
    if missing := [key for key in SPEED_KEYS if key not in row]:
        yield f"{title}: {', '.join(missing)} missing"
        return
    if row["size"] not in SIZES:
        yield f"{title}: no such size"
        return
    size = SIZES[row["size"]]
    tokens = row["micro_batch"] * size.sequence * ranks
    if not math.isclose(tokens / row["seconds"], row["tokens_per_second"], rel_tol=0.01):
        yield f"{title}: {tokens} tokens in {row['seconds']} s are not {row['tokens_per_second']}/s"
    floor = size.flops_per_token(is_causal=True) * tokens / (ranks * product * 1e12)
    if row["seconds"] * SLACK < floor:
        yield f"{title}: {row['seconds']:.4g} s, but its products alone take {floor:.4g} s"


def hardware_of(name: str) -> Hardware | None:
    """The devices that a plan knows by a device's name; None if it knows none."""
    from megatron_ds.planning.hardware import HARDWARE

    kind = next((kind for part, kind in DEVICES.items() if part in name.upper()), None)
    return None if kind is None else HARDWARE[kind]


def planned(size: GptSize, ranks: int, micro_batch: int, device: Hardware) -> Plan:
    """The plan of a size with data parallelism and ZeRO 1."""
    from megatron_ds.cli import arguments
    from megatron_ds.planning.command import complete
    from megatron_ds.planning.plan import make_plan

    common = {
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * ranks,
        "zero_stage": 1,
        "bf16": True,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "vocab_size": size.vocab,
    }
    words = [str(word) for word in flags({**size.command(), **common})]
    config = arguments.parse(
        words, world_size=ranks, complete=complete, program="gpu.py", raises=True
    )
    return make_plan(config, ranks, device)


def with_measured_rates(values: Mapping[str, Any]) -> Hardware:
    """The device with the rates of a file: products, memory and links."""
    from megatron_ds.planning.hardware import HARDWARE

    device = hardware_of(values["device"]) or HARDWARE["cpu"]
    rates = values["rates"]
    links = values.get("links") or {}
    tflops = max(device.tflops_16, rates["bf16_tflops"])
    return dataclasses.replace(
        device,
        tflops_16=tflops,
        share=rates["bf16_tflops"] / tflops,
        memory_rate=rates["copy_tb_s"] * 1e12,
        inside=links["gb_s"] * 1e9 if links else device.inside,
    )


def _collectives(ranks: int, tiny: bool) -> Row:
    if ranks == 1:
        return {"collectives": [], "links": {}}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        num_bytes = 2**20 if tiny else 2**28
        done = run([*_launcher(ranks), HERE / "collectives.py", report, num_bytes], timeout=120)
        if done.status:
            row = {"operation": "start", "passed": False, "output": done.output[-2000:]}
            return {"collectives": [row], "links": {}}
        return read_json(report)


def _losses(more: Mapping[str, object], ranks: int) -> Row:
    """Losses of a tiny run in fp32 with some layout."""
    with tempfile.TemporaryDirectory() as folder:
        values = {**TINY_RUN, **more, "save": folder}
        done = run([*_launcher(ranks), "pretrain_gpt.py", *flags(values)], timeout=120)
        file = Path(folder) / "metrics.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    records = map(json.loads, text.splitlines())
    losses = [record["lm_loss"] for record in records if "lm_loss" in record]
    return {"losses": losses, **({"output": done.output[-2000:]} if done.status else {})}


def _speed(name: str, ranks: int, values: Mapping[str, Any], *, tiny: bool) -> Row:
    """Tokens per second of a size on all devices, and what was planned."""
    size = SIZES[name]
    warm_up, timed = (1, 2) if tiny else (6, 15)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = random_tokens(folder / "tokens", size.vocab, 64 * size.sequence * ranks)

        def program(report: Path, micro_batch: int) -> Any:
            settings = train.training_flags(size, tokens, micro_batch)
            settings |= {"train_iters": warm_up + timed + 2, "zero_stage": 1}
            words = [HERE / "measured_run.py", report, warm_up, timed, "-", *flags(settings)]
            return run([*_launcher(ranks), *words], timeout=150)

        memory = values["rates"].get("memory_gib", math.inf)
        row = train.largest_that_fits(program, size, folder, memory)
    if "seconds" not in row:
        return row
    micro_batch = row["micro_batch"]
    device = hardware_of(values["device"])
    before = device and planned(size, ranks, micro_batch, device).tokens_per_second
    after = planned(size, ranks, micro_batch, with_measured_rates(values)).tokens_per_second
    rate = micro_batch * size.sequence * ranks / row["seconds"]
    return {
        "size": name,
        "micro_batch": micro_batch,
        "seconds": row["seconds"],
        "tokens_per_second": rate,
        "peak_bytes": row.get("peak_bytes"),
        "planned": before,
        "planned_after": after,
    }


def _launcher(ranks: int) -> list[object]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the file at once."""
    draft = path.with_suffix(".draft")
    write_json(draft, dict(values))
    draft.replace(path)
