"""A speed certificate: what the devices of one machine compute and send, in one JSON file.

Parts are measured one after the other, and the file is written after each, so that the same command
continues where it ended. `certificate_rules.py` says why a file is not accepted.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.accelerator import certificate_files, train
from benchmarks.accelerator.certificate_rules import (
    FORMAT,
    LOSSES,
    MEASURED,
    TINY_SIZES,
    VOCABULARY,
    all_passed,
    hardware_of,
    head_problems,
    layouts,
    problems,
)
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

if TYPE_CHECKING:
    from megatron_ds.planning.hardware import Hardware
    from megatron_ds.planning.plan import Plan

HERE = Path(__file__).resolve().parent
FOLDER = REPOSITORY / "benchmarks" / "certificates"
SHOWN = 8
"""Lines of the output of a failed part that are printed."""
TINY_RUN: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "train_iters": LOSSES,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY - 1,  # the end-of-document token is not counted
    "log_interval": 1,
    "eval_iters": 0,
    "no_compile": True,
}


def measure(
    path: Path, ranks: int, about: Mapping[str, Any], rates: Callable[[], Row], *, tiny: bool
) -> Iterator[Row]:
    """Measure the parts that a file lacks, and write it after each.

    Args:
        path: The file.
        ranks: Devices that are used.
        about: Name of a device, and versions.
        rates: Measures the rates of a device; an empty row if that fails.
        tiny: Measure tiny models, on a CPU.

    Yields:
        A row for each part, whether it "passed", and then for each reason why the file is refused.
        Nothing is measured if it would be refused in any case.

    Raises:
        RefusedFileError: If the file has other content, which stays.
    """
    head = {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "ranks": ranks,
        **about,
    }
    values = certificate_files.begin_or_continue(path, head, tiny=tiny)
    if refused := list(head_problems(values, tiny=tiny)):
        yield from ({"name": text, "passed": False} for text in refused)
        return
    for row in _parts(values, ranks, rates, tiny=tiny):
        if row["passed"]:
            certificate_files.write(path, values)
        yield row
    for text in problems(values):
        yield {"name": text, "passed": False}


def _parts(values: Row, ranks: int, rates: Callable[[], Row], *, tiny: bool) -> Iterator[Row]:
    """Measure the parts that a file lacks, and add to its values those that passed."""
    if "rates" not in values and budget.left:
        if measured := rates():
            values["rates"] = measured
        yield {"name": "rates of the device", "passed": bool(measured)}
    if "rates" not in values:
        return  # which the plans of speeds need
    if not ("collectives" in values and all_passed(values)) and budget.left:
        found, output = _collectives(ranks, tiny)
        values |= found
        passed = all_passed(values)
        yield {"name": "collectives", "passed": passed, "output": output}
    for name, more in layouts(ranks).items():
        if all(row["name"] != name for row in values["layouts"]) and budget.left:
            losses, output = _losses(more, ranks)
            passed = len(losses) == LOSSES and not output
            if passed:
                values["layouts"].append({"name": name, "losses": losses})
            yield {"name": name, "passed": passed, "output": output}
    for name in TINY_SIZES if tiny else MEASURED:
        if all(row["size"] != name for row in values["speeds"]) and budget.left:
            row = _speed(name, ranks, values, tiny=tiny)
            passed = "tokens_per_second" in row
            if passed:
                values["speeds"].append(row)
            yield {"name": name, **row, "passed": passed}


def lines(row: Row) -> Iterator[str]:
    """Format the outcome of a part, with the end of its output if it failed."""
    text = f"{row['name']:20} {'passed' if row['passed'] else 'FAILED'}"
    if "tokens_per_second" in row:
        planned = f"planned {row['planned']:,.0f}" if row["planned"] else "no plan for this device"
        text += f"  {row['tokens_per_second']:,.0f} tokens/s, {planned}, "
        text += f"{row['planned_after']:,.0f} with the measured rates"
    yield text
    if not row["passed"]:
        yield from (f"    {line}" for line in row.get("output", "").splitlines()[-SHOWN:])


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


def _collectives(ranks: int, tiny: bool) -> tuple[Row, str]:
    """Rows of collectives and rates of links, and what failed."""
    if ranks == 1:
        return {"collectives": [], "links": {}}, ""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        num_bytes = 2**20 if tiny else 2**28
        done = run([*_launcher(ranks), HERE / "collectives.py", report, num_bytes], timeout=120)
        if done.status or not report.exists():
            return {"collectives": [], "links": {}}, done.output
        found = read_json(report)
    failed = [
        f"{row['operation']} over {row['axis']} of {row['layout']}"
        for row in found["collectives"]
        if not row["passed"]
    ]
    return found, "\n".join(failed)


def _losses(more: Mapping[str, object], ranks: int) -> tuple[list[float], str]:
    """Losses of a tiny run in fp32 with some layout, and its output if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        values = {**TINY_RUN, **more, "save": folder}
        done = run([*_launcher(ranks), "pretrain_gpt.py", *flags(values)], timeout=120)
        file = Path(folder) / "metrics.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    if done.status:
        return [], done.output or f"status {done.status}"
    records = map(json.loads, text.splitlines())
    return [record["lm_loss"] for record in records if "lm_loss" in record], ""


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
    """The revision of the checkout; "unknown" without git."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
