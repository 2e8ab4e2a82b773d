"""Peak memory of a forward and backward pass per token of a long sequence, on the CPU.

    python benchmarks/long_sequences.py --output long_sequences.json

A small model processes one sequence, which consists of documents with attention inside them, so
that a run takes minutes; `--document 0` computes attention over the complete sequence. Each setting
runs in fresh processes. The peak is the largest resident set of any rank beyond that of the built
model, divided by the tokens of the complete sequence. Freed blocks are returned to the system, as
those of more than 32 MiB, which larger models have, always are. Results:
docs/training/long_sequences.md.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common import this_machine, versions, write_json
from megatron_ds.config import ModelConfig, RecomputeConfig
from megatron_ds.launch.device import PeakMemory
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.attention.packed import PackingOptions
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

EOD = 0
M_MMAP_THRESHOLD, MAPPED = -3, 2**20
"""Option of glibc's mallopt; bytes from which a block is mapped, and unmapped when it is freed."""
WARM_UP = 64
"""Tokens of a first pass, which loads libraries and allocates the gradients of the weights."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What saves memory."""

    name: str
    recompute: bool = False
    tiled_mlp: bool = False
    ranks: int = 1
    """Sequence-parallel size."""


SETTINGS = (
    Setting("nothing"),
    Setting("--recompute-granularity full", recompute=True),
    Setting("... --tiled-mlp", recompute=True, tiled_mlp=True),
    Setting("... --ds-sequence-parallel-size 2", recompute=True, tiled_mlp=True, ranks=2),
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of the model."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    document: int
    """Tokens of a document; 0: the sequence is one."""

    def config(self, length: int) -> ModelConfig:
        return ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=length,
            vocab_size=self.vocab,
            position_embedding_type="rope",
            activation="swiglu",
            normalization="RMSNorm",
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )


def measure(shape: Shape, setting: Setting, length: int, rank: int, store: str) -> float:
    """Return the peak bytes of a rank per token of the sequence."""
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
    mesh = Mesh.single()
    if setting.ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.ranks
        )
        mesh = Mesh.build(1, sp_size=setting.ranks)
    rng = RngStreams(0, sp_rank=mesh.sp.rank)
    granularity = "full" if setting.recompute else None
    options = RecomputeConfig(recompute_granularity=granularity, tiled_mlp=setting.tiled_mlp)
    packing = PackingOptions(EOD, False, True) if shape.document else None
    model = GPTModel(
        shape.config(length),
        mesh=mesh,
        rng=rng,
        seed=1,
        checkpointing=ActivationCheckpointing(options, rng),
        attention=AttentionOptions(packing=packing),
    )
    tokens = torch.randint(EOD + 1, shape.vocab, (1, length + 1))
    if shape.document:
        tokens[:, shape.document - 1 :: shape.document] = EOD
    model(tokens[:, :WARM_UP], tokens[:, 1 : WARM_UP + 1]).mean().backward()
    peak = PeakMemory()
    model(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    size = peak.bytes()
    assert size is not None, "this system does not report the peak memory of a process"
    if setting.ranks > 1:
        dist.destroy_process_group()
    return size / length


def peak_per_token(shape: Shape, setting: Setting, length: int) -> float:
    """Return the largest peak of the ranks."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(setting.ranks, spawn, max_tasks_per_child=1) as pool,
    ):
        store = str(Path(folder) / "store")
        ranks = [
            pool.submit(measure, shape, setting, length, rank, store)
            for rank in range(setting.ranks)
        ]
        return max(result.result() for result in ranks)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    numbers = range(1, len(SETTINGS) + 1)
    parser.add_argument(
        "--settings", type=int, nargs="+", choices=numbers, default=list(numbers), help="rows (all)"
    )
    parser.add_argument("--layers", type=int, default=2, help="layers (2)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (64)")
    parser.add_argument("--heads", type=int, default=2, help="attention heads (2)")
    parser.add_argument("--vocab", type=int, default=1024, help="vocabulary size (1024)")
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document (2048)")
    parser.add_argument("--output", type=Path, default=None, help="output file (JSON)")
    options = parser.parse_args(words)
    shape = Shape(options.layers, options.hidden, options.heads, options.vocab, options.document)
    results: dict[str, dict[int, float]] = {}
    for setting in (SETTINGS[number - 1] for number in options.settings):
        for length in options.lengths:
            begin = time.perf_counter()
            found = peak_per_token(shape, setting, length)
            results.setdefault(setting.name, {})[length] = found
            seconds = time.perf_counter() - begin
            print(f"{setting.name}, {length} tokens: {found:,.0f} bytes per token, {seconds:.0f} s")
    if options.output is not None:
        result = {
            "machine": dataclasses.asdict(this_machine()),
            "versions": versions(["torch"]),
            "shape": dataclasses.asdict(shape),
            "peak_bytes_per_token": results,
        }
        write_json(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
