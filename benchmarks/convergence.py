#!/usr/bin/env python
"""Loss of the demo's model on held-out text after the same number of tokens, in several recipes.

    python benchmarks/convergence.py --output results.json --image curves.png

The recipes are GPT-2 with AdamW and a cosine, the parts of Qwen 3 with z-loss, Muon, a constant
rate with a decay at the end (WSD), the mean of the last checkpoints of a constant rate, and the
first one in bf16, with all states in bf16 and with linear layers in fp8. Beside them, GPT-2 in
plain PyTorch is trained as nanoGPT does. Every recipe runs with several seeds, and a seed
determines the weights and the order of the data. The text is the standard library of Python.
Results are written after every run, and a run that is recorded in the output is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accelerator.models import BF16_STATES
from benchmarks.accelerator.processes import Row, flags, run
from benchmarks.common import this_machine, versions, write_json

LAYERS = 4
HIDDEN = 192
HEADS = 6
SEQUENCE = 256
VOCAB = 4096
BATCH = 8
PLAIN = "GPT-2 in plain PyTorch, nanoGPT's settings"
MERGED = "constant rate, mean of 5 checkpoints"
WARM_UP = 0.1
"""Fraction of the iterations in which the rate rises."""
DECAY = 0.2
"""Fraction of the iterations in which the rate falls in WSD."""
MERGES = 5
"""Merged checkpoints."""
LIMIT_S = 3600.0
"""Longest time of a run, in seconds."""
COSINE = {"lr_decay_style": "cosine", "lr": 1.5e-3, "min_lr": 1.5e-4}
BF16 = {**COSINE, "bf16": True}
IN_BF16 = "GPT-2, AdamW, cosine, bf16"
FP8 = {
    f"GPT-2, AdamW, cosine, fp8 {recipe}": {
        **BF16,
        "fp8_format": form,
        "fp8_recipe": recipe,
        "fp8_min_features": 1,
    }
    for recipe, form in (("tensorwise", "hybrid"), ("rowwise", "hybrid"), ("blockwise", "e4m3"))
}
CONSTANT = {"lr_decay_style": "constant", "lr": 1.5e-3}
RECIPES: dict[str, Mapping[str, object]] = {
    "GPT-2, AdamW, cosine": COSINE,
    "Qwen 3, AdamW, cosine, z-loss": {
        **COSINE,
        "swiglu": True,
        "ffn_hidden_size": 512,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "qk_layernorm": True,
        "num_query_groups": 2,
        "disable_bias_linear": True,
        "z_loss_coeff": 1e-4,
    },
    "GPT-2, Muon, cosine": {**COSINE, "optimizer": "muon"},
    "GPT-2, AdamW, WSD": {
        **COSINE,
        "lr_decay_style": "WSD",
        "lr_wsd_decay_style": "minus_sqrt",
        "min_lr": 0,
    },
    MERGED: CONSTANT,
    IN_BF16: BF16,
    "GPT-2, AdamW, cosine, bf16 rounded stochastically": {**BF16, **BF16_STATES},
    "GPT-2, AdamW, cosine, states in bf16": {
        **BF16,
        **BF16_STATES,
        "bf16_stochastic_round": False,
    },
    **FP8,
}
"""Name -> flags beyond the common ones."""
Case = tuple[int, str, int]
"""Seed, name of the recipe and number of iterations of a run."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--iterations", type=int, default=300, help="of a run (default: %(default)s)")
    add("--seeds", type=int, default=3, help="runs of each recipe (default: %(default)s)")
    add("--jobs", type=int, default=2, help="runs at a time, each with one thread")
    names = [PLAIN, *RECIPES]
    add("--recipes", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    add("--output", type=Path, help="file for the results (JSON), also of earlier runs")
    add("--image", type=Path, help="file for the loss curves (PNG)")
    options = parser.parse_args(argv)
    runs = recorded_runs(options.output)
    seeds = range(1, options.seeds + 1)
    cases = [(seed, name, options.iterations) for seed in seeds for name in options.recipes]
    for case, row in train_all([case for case in cases if case not in runs], options.jobs):
        print(f"{row['name']}, seed {row['seed']}: {row['loss']:.4f}", flush=True)
        runs[case] = row
        if options.output is not None:
            machine = {**vars(this_machine()), **versions(("torch", "deepspeed"))}
            write_json(options.output, {"machine": machine, "runs": list(runs.values())})
    chosen = [runs[case] for case in cases]
    print(*summary(chosen, options.recipes), sep="\n")
    if options.image is not None:
        plot(chosen, options.recipes, options.image)
    return 0


def recorded_runs(output: Path | None) -> dict[Case, Row]:
    """The runs of a file of results; none if there is no file."""
    if output is None or not output.is_file():
        return {}
    rows = json.loads(output.read_text(encoding="utf-8"))["runs"]
    return {(row["seed"], row["name"], row["iterations"]): row for row in rows}


def train_all(cases: list[Case], jobs: int) -> Iterator[tuple[Case, Row]]:
    """Train recipes; yields the results as they come."""
    if not cases:
        return
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        folder = Path(temporary)
        data = make_data(folder)
        runs = {
            pool.submit(train, name, seed, folder, data, iterations): (seed, name, iterations)
            for seed, name, iterations in cases
        }
        for done in as_completed(runs):
            seed, name, iterations = runs[done]
            row = {"name": name, "seed": seed, "iterations": iterations, **done.result()}
            yield runs[done], row


def summary(rows: list[Row], names: list[str]) -> Iterator[str]:
    """Losses of the recipes, and of variants of bf16 the gap to it with the same seeds."""
    losses = {
        name: {row["seed"]: row["loss"] for row in rows if row["name"] == name} for name in names
    }
    for name, by_seed in losses.items():
        values = by_seed.values()
        line = f"{name:45} {statistics.mean(values):.4f}  ({min(values):.4f} to {max(values):.4f})"
        if "bf16" in RECIPES.get(name, {}) and name != IN_BF16 and IN_BF16 in losses:
            gaps = [loss / losses[IN_BF16][seed] - 1 for seed, loss in by_seed.items()]
            mean = statistics.mean(values) / statistics.mean(losses[IN_BF16].values()) - 1
            line += f"  {mean:+.2%} of bf16 ({', '.join(f'{gap:+.2%}' for gap in gaps)})"
        yield line


def make_data(folder: Path) -> dict[str, object]:
    """Make token files of training and held-out text; return the flags that name them."""
    tokenizer = {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": folder / "vocab.json",
        "merge_file": folder / "merges.txt",
    }
    corpus = folder / "corpus.jsonl"
    command("make_corpus", {"output": corpus})
    documents = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = {"train": documents[: len(documents) * 19 // 20], "valid": documents[-20:]}
    for name, lines in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    trained = {"input": folder / "train.jsonl", "vocab_size": VOCAB, "output_dir": folder}
    command("train_tokenizer", trained)
    for name in parts:
        files = {"input": folder / f"{name}.jsonl", "output_prefix": folder / name}
        command("preprocess_data", {**files, "append_eod": True, **tokenizer})
    return tokenizer


def command(tool: str, values: Mapping[str, object], *words: object) -> str:
    """Run a tool and return its output.

    Raises:
        RuntimeError: If it failed.
    """
    done = run([f"tools/{tool}.py", *flags(values), *words], cpu=True)
    if done.status:
        raise RuntimeError(f"tools/{tool}.py failed:\n{done.output[-3000:]}")
    return done.output


def train(name: str, seed: int, folder: Path, data: Mapping[str, object], iterations: int) -> Row:
    """Train one recipe; return its loss on the held-out text and its curve."""
    save = folder / f"{name.replace(' ', '-')}-{seed}"
    if name == PLAIN:
        script = __file__.replace("convergence", "nano_loop")
        done = run([script, folder, seed, iterations, save], timeout=LIMIT_S)
        if done.status:
            raise RuntimeError(done.output[-3000:])
        report: Row = json.loads(save.read_text(encoding="utf-8"))
        return report
    step = max(1, iterations // 30)
    common = {
        **data,
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "seq_length": SEQUENCE,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "micro_batch_size": BATCH,
        "global_batch_size": BATCH,
        "train_iters": iterations,
        "lr_warmup_iters": round(WARM_UP * iterations),
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "train_data_path": folder / "train_text_document",
        "seed": seed,
        "eval_iters": 0,
        "log_interval": step,
        "save": save,
        "save_interval": step if name == MERGED else iterations,
    }
    wsd = {"lr_wsd_decay_iters": round(DECAY * iterations)} if "WSD" in name else {}
    words = flags({**common, **RECIPES[name], **wsd})
    done = run(["pretrain_gpt.py", *words], cpu=True, timeout=LIMIT_S)
    if done.status:
        raise RuntimeError(done.output[-3000:])
    last = [save / f"global_step{iterations - step * back}" for back in range(MERGES)]
    evaluated = {
        **data,
        "valid_data": folder / "valid_text_document",
        "overlapping_eval": SEQUENCE,
        "load": last[0],
    }
    merge = ["--merge-with", *last[1:]] if name == MERGED else []
    result = folder / f"{save.name}.json"
    command("evaluate", {**evaluated, "output": result}, *merge)
    found = json.loads(result.read_text(encoding="utf-8"))
    lines = (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["lm_loss"] for row in map(json.loads, lines) if "lm_loss" in row]
    ends = range(step, len(losses) + 1, step)
    curve = [(end, statistics.mean(losses[end - step : end])) for end in ends]
    return {"loss": math.log(found["perplexity"]), "curve": curve}


def plot(rows: list[Row], names: list[str], file: Path) -> None:
    """Draw the mean curve of the seeds of each recipe."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in names:
        curves = [row["curve"] for row in rows if row["name"] == name]
        steps = [iteration for iteration, _ in curves[0]]
        means = [
            statistics.mean(loss for _, loss in points) for points in zip(*curves, strict=True)
        ]
        axes.plot(steps, means, label=name)
    axes.set(xlabel="iteration", ylabel="training loss, nats per token")
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
