"""Short runs of the features, compared with the same runs on the CPU.

The model is the demo's, on Python's standard library as text. fp32 runs must follow the CPU's
losses; runs of lower precision must end near them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accelerator.processes import Outcome, flags, run

FP32_TOLERANCE, LOW_TOLERANCE = 1e-4, 5e-2
"""Largest relative difference of a loss from the CPU's fp32 run, over COMPARED iterations."""
COMPARED = 10


@dataclass(frozen=True)
class Case:
    """Flags of a run beyond the common ones."""

    flags: Mapping[str, object] = field(default_factory=dict)
    reference: str | None = "cpu"
    """Run whose losses it must follow: "cpu", "cpu documents", or None."""
    tolerance: float = FP32_TOLERANCE
    cpu: bool = False


DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
CASES = {
    "cpu": Case(cpu=True, reference=None),
    "cpu documents": Case(DOCUMENTS, cpu=True, reference=None),
    "fp32": Case(),
    "bf16": Case({"bf16": True}, tolerance=LOW_TOLERANCE),
    "fp16": Case({"fp16": True}, tolerance=LOW_TOLERANCE),
    **{f"zero {stage}": Case({"zero_stage": stage}) for stage in (0, 2, 3)},
    "optimizer on the host": Case({"zero_stage": 2, "cpu_optimizer": True}),
    "parameters on the host": Case(
        {"zero_stage": 3, "cpu_optimizer": True, "remote_device": "cpu"}
    ),
    "full recomputation": Case({"recompute_granularity": "full", "recompute_method": "uniform"}),
    "selective recomputation": Case({"recompute_granularity": "selective"}),
    "compiled": Case({"compile": True}),
    "compiled bf16": Case({"compile": True, "bf16": True}, tolerance=LOW_TOLERANCE),
    "documents": Case(DOCUMENTS, "cpu documents"),
    "documents bf16": Case({**DOCUMENTS, "bf16": True}, "cpu documents", LOW_TOLERANCE),
    "dropout": Case({"attention_dropout": 0.1, "hidden_dropout": 0.1}, reference=None),
}
"""Name -> run. "fp32" saves a checkpoint, from which text is generated."""


def measure(
    iterations: int, *, names: tuple[str, ...] = tuple(CASES), jobs: int = 1, tiny: bool = False
) -> dict[str, Any]:
    """Run the cases and generate text from the checkpoint of "fp32" on both devices.

    Args:
        iterations: Iterations of each run.
        names: Cases to run; references must be among them.
        jobs: Runs at a time.
        tiny: Train a tiny model on a few of the documents.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        common = {**_data(folder, tiny), **_model(tiny), "train_iters": iterations}
        with ThreadPoolExecutor(jobs) as pool:
            outcomes = pool.map(lambda name: _train(folder, name, common, iterations), names)
            ends = dict(zip(names, outcomes, strict=True))
        losses = {name: _losses(folder, name) for name in names}
        rows = [_judge(name, ends[name], losses) for name in names]
        if "fp32" in names:
            rows.append(_generate(folder))
    return {"runs": rows, "passed": all(row["passed"] for row in rows)}


def lines(result: dict[str, Any]) -> list[str]:
    """Format the outcome of every case."""
    text = []
    for row in result["runs"]:
        difference = row.get("difference")
        detail = "" if difference is None else f"differs by {difference:.1e} at most"
        verdict = "passed" if row["passed"] else "FAILED"
        text.append(f"{row['name']:26}{verdict:8}{row['wall_seconds']:7.1f} s  {detail}")
        text += ["    " + line for line in row.get("output", "").splitlines()[-8:]]
    return text


def _data(folder: Path, tiny: bool) -> dict[str, object]:
    """Make a corpus, a tokenizer and token files; return the flags that name them."""
    corpus, tokens = folder / "corpus.jsonl", folder / "text"
    tokenizer = {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": folder / "vocab.json",
        "merge_file": folder / "merges.txt",
    }
    steps: list[tuple[str, dict[str, object]]] = [
        ("make_corpus", {"output": corpus}),
        ("train_tokenizer", {"input": corpus, "vocab_size": 4096, "output_dir": folder}),
        (
            "preprocess_data",
            {"input": corpus, "output_prefix": tokens, "append_eod": True, **tokenizer},
        ),
    ]
    for name, values in steps:
        done = run([f"tools/{name}.py", *flags(values)], cpu=True)
        if done.status:
            raise RuntimeError(f"tools/{name}.py failed:\n{done.output}")
        if tiny and name == "make_corpus":
            first = corpus.read_text(encoding="utf-8").splitlines(keepends=True)[:60]
            corpus.write_text("".join(first), encoding="utf-8")
    return {"data_path": f"{tokens}_text_document", **tokenizer}


def _model(tiny: bool) -> dict[str, object]:
    shape = (2, 64, 4, 64) if tiny else (4, 192, 6, 256)
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return {
        **dict(zip(names, shape, strict=True)),
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "lr": 1e-3,
        "split": "90,5,5",
        "eval_iters": 1,
        "log_interval": 1,
    }


def _train(folder: Path, name: str, common: Mapping[str, object], iterations: int) -> Outcome:
    case, save = CASES[name], folder / name.replace(" ", "-")
    checkpoint = {"save": save, "save_interval": iterations}
    return run(["pretrain_gpt.py", *flags({**common, **case.flags, **checkpoint})], cpu=case.cpu)


def _losses(folder: Path, name: str) -> list[float]:
    file = folder / name.replace(" ", "-") / "metrics.jsonl"
    if not file.exists():
        return []
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [record["lm_loss"] for record in records if "lm_loss" in record]


def _judge(name: str, end: Outcome, losses: Mapping[str, list[float]]) -> dict[str, Any]:
    case, row = CASES[name], {"name": name, **end.describe(), "losses": losses[name]}
    passed = end.status == 0
    if case.reference is not None and passed:
        pairs = list(zip(losses[name], losses[case.reference], strict=False))[:COMPARED]
        row["difference"] = max((abs(a / b - 1) for a, b in pairs), default=float("inf"))
        passed = row["difference"] <= case.tolerance
    return {**row, "passed": passed}


def _generate(folder: Path) -> dict[str, Any]:
    """Greedy text of both devices from one checkpoint must be equal."""
    values = {"load": folder / "fp32", "greedy": True, "out_seq_length": 16}
    texts, row = [], {"name": "generation"}
    for cpu in (True, False):
        output = folder / f"text-{cpu}.txt"
        words = flags({**values, "sample_output_file": output})
        prompts = ["--prompt", "def __init__(self", "import os"]
        row |= run(["tools/generate_samples_gpt.py", *words, *prompts], cpu=cpu).describe()
        texts.append(output.read_text(encoding="utf-8") if output.exists() else None)
    return {**row, "passed": texts[0] is not None and texts[0] == texts[1]}
