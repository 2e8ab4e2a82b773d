#!/usr/bin/env python
"""Rate of lm-evaluation-harness on our model, relative to its own model of transformers.

    python benchmarks/evaluate.py [--rounds 5] [--output evaluate.json]

Both answer the same requests for log-likelihoods, contexts and continuations of mixed lengths, with
the same weights, batch size and threads, each in its own process. The processes run in turn.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    Contender,
    Work,
    in_turn,
    paired_ratio,
    this_machine,
    versions,
    write_json,
    write_word_model,
)

VOCAB = 8192
LENGTH = 256
BATCH = 8
REQUESTS = 96
OURS = "megatron_ds"
THEIRS = "hf"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads of each contender")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        shape = {"n_embd": 256, "n_layer": 6, "n_head": 8}
        write_word_model(Path(folder), vocab_size=VOCAB, n_positions=LENGTH, **shape)
        contenders = [
            Contender(name, build, Path(folder), options.threads)
            for name, build in ((OURS, build_ours), (THEIRS, build_theirs))
        ]
        try:
            in_turn(contenders, 1, 1)
            ours, theirs = in_turn(contenders, options.rounds, 1)
        finally:
            for contender in contenders:
                contender.close()
    ratio = paired_ratio([[each] for each in theirs], [[each] for each in ours])
    machine = this_machine()
    print(f"{machine.cpu}, {machine.cores} cores, load {machine.load}")
    for name, seconds in ((OURS, ours), (THEIRS, theirs)):
        print(f"{name:12} {REQUESTS / statistics.median(seconds):8.1f} requests/s")
    print(f"{OURS} / {THEIRS}: {ratio:.2f} (target: at least 1)")
    if options.output is not None:
        result = {"machine": asdict(machine), "versions": versions(["torch", "lm_eval"])}
        write_json(
            options.output, {**result, "seconds": {OURS: ours, THEIRS: theirs}, "ratio": ratio}
        )
    return 0


def requests() -> list[Any]:
    from lm_eval.api.instance import Instance

    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(f"w{draw.randrange(VOCAB - 1)}" for _ in range(draw.randint(1, most)))

    pairs = [(words(LENGTH - 40), f" {words(30)}") for _ in range(REQUESTS)]
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]


def build_ours(folder: Path, threads: int) -> Work:
    import torch

    torch.set_num_threads(threads)
    from megatron_ds.evaluation.harness import HarnessModel

    return _work(HarnessModel(f"hf:{folder}", batch_size=BATCH), threads)


def build_theirs(folder: Path, threads: int) -> Work:
    from lm_eval.models.huggingface import HFLM

    return _work(HFLM(pretrained=str(folder), device="cpu", batch_size=BATCH), threads)


def _work(model: Any, threads: int) -> Work:
    import torch

    torch.set_num_threads(threads)
    asked = requests()

    def answer(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            model.loglikelihood(asked, disable_tqdm=True)
        return time.perf_counter() - start

    return functools.partial(answer)


if __name__ == "__main__":
    sys.exit(main())
