"""Peak memory, time and messages of a forward and backward pass of a long sequence, on the CPU.

    python benchmarks/long_sequences.py --output long_sequences.json

A small model processes one sequence, which consists of documents with attention inside them, so
that a run takes minutes; `--document 0` computes attention over the complete sequence. Each setting
runs in fresh processes. The peak is the largest resident set of any rank beyond that of the built
model, divided by the tokens of the complete sequence. The time is that of all ranks' processors
together, the bytes are what all ranks send, and the multiplications those of the busiest rank
relative to the mean, counted at the shortest length, in which causal attention counts the keys that
queries see. Freed blocks are returned to the system, as
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
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from benchmarks.communication import message_log
from megatron_ds.config import ModelConfig, RecomputeConfig
from megatron_ds.config.options.parallel import ALL_GATHER, P2P
from megatron_ds.launch.device import PeakMemory
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.attention.packed import PackingOptions
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

EOD = 0
M_MMAP_THRESHOLD = -3
"""Option of glibc's mallopt."""
MAPPED = 2**20
"""Bytes from which a block is mapped, and unmapped when it is freed."""
WARM_UP = 64
"""Tokens of a first pass, which loads libraries and allocates the gradients of the weights."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What saves memory."""

    name: str
    recompute: bool = False
    tiled_mlp: bool = False
    ulysses: int = 1
    """Size of DeepSpeed-Ulysses."""
    cp: int = 1
    """Context-parallel size."""
    kind: str = P2P
    """Kind of exchange of context-parallel ranks."""

    @property
    def ranks(self) -> int:
        return self.ulysses * self.cp


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one rank, or of all."""

    peak: float
    """Bytes per token of the sequence; the largest of the ranks."""
    seconds: float
    """CPU seconds; the sum of the ranks."""
    sent: int
    """Bytes of messages; the sum of the ranks."""
    multiplied: float
    """Multiplications of the counted pass; of all ranks the largest relative to the mean."""


def saving(name: str, ulysses: int = 1, cp: int = 1, kind: str = P2P) -> Setting:
    """A setting with recomputation and tiles."""
    return Setting(f"... {name}", True, True, ulysses, cp, kind)


SETTINGS = (
    Setting("nothing"),
    Setting("--recompute-granularity full", recompute=True),
    saving("--tiled-mlp"),
    saving("--ds-sequence-parallel-size 2", ulysses=2),
    saving("--context-parallel-size 2", cp=2),
    saving("--context-parallel-size 2 --cp-comm-type all_gather", cp=2, kind=ALL_GATHER),
    saving("--context-parallel-size 4", cp=4),
    saving("--context-parallel-size 4 --cp-comm-type all_gather", cp=4, kind=ALL_GATHER),
    Setting("--context-parallel-size 4", cp=4),
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


def attention_multiplications(
    queries: Sequence[int], keys: Sequence[int], values: Sequence[int], *arguments: Any, **_: Any
) -> int:
    """Of torch's flash attention for CPUs, whose causal mask leaves out half of the keys."""
    batch, heads, length, size = queries
    is_causal = len(arguments) > 1 and bool(arguments[1])
    pairs = length * (length + 1) // 2 if is_causal else length * keys[2]
    return 2 * batch * heads * pairs * (size + values[3])


class Pass:
    """The model of a rank, and a function that computes a forward and backward pass."""

    def __init__(self, shape: Shape, setting: Setting, length: int, mesh: Mesh) -> None:
        rng = RngStreams(0, sp_rank=mesh.sequence.rank)
        granularity = "full" if setting.recompute else None
        options = RecomputeConfig(recompute_granularity=granularity, tiled_mlp=setting.tiled_mlp)
        self.packing = PackingOptions(False, True) if shape.document else None
        self.model = GPTModel(
            shape.config(length),
            mesh=mesh,
            rng=rng,
            seed=1,
            checkpointing=ActivationCheckpointing(options, rng),
            attention=AttentionOptions(packing=self.packing, exchanges=(setting.kind,)),
        )
        self.tokens = torch.randint(EOD + 1, shape.vocab, (1, length + 1))
        if shape.document:
            self.tokens[:, shape.document - 1 :: shape.document] = EOD

    def run(self, length: int) -> None:
        tokens = self.tokens[:, : length + 1]
        packing = self.packing
        documents = None if packing is None else packing.documents(tokens[:, :-1] == EOD)
        self.model(tokens[:, :-1], tokens[:, 1:], documents=documents).mean().backward()


def measure(
    shape: Shape, setting: Setting, length: int, counted: int, rank: int, store: str
) -> Figures:
    """Return the figures of a rank.

    Args:
        shape: Shape of the model.
        setting: What saves memory.
        length: Tokens of the sequence.
        counted: Tokens of the sequence whose multiplications are counted.
        rank: The rank.
        store: File through which the ranks find each other.
    """
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
    mesh = Mesh.single()
    if setting.ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.ranks
        )
        mesh = Mesh.build(1, ulysses_size=setting.ulysses, cp_size=setting.cp)
    of_rank = Pass(shape, setting, length, mesh)
    of_rank.run(WARM_UP)
    peak = PeakMemory()
    begin = time.process_time()
    of_rank.run(length)
    seconds = time.process_time() - begin
    used = peak.bytes()
    assert used is not None, "this system does not report the peak memory of a process"
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {flash: attention_multiplications}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, message_log(0) as log:
        of_rank.run(counted)
    if setting.ranks > 1:
        dist.destroy_process_group()
    share = (setting.ranks - 1) / setting.ranks
    sent = sum(
        size * times * (1 if operation == "send" else share)
        for (operation, times), size in log.messages.items()
    )
    sent = round(sent * length / counted)
    return Figures(used / length, seconds, sent, counter.get_total_flops() / 2)


def of_all_ranks(shape: Shape, setting: Setting, length: int, counted: int) -> Figures:
    """Measure a setting in fresh processes."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(setting.ranks, spawn, max_tasks_per_child=1) as pool,
    ):
        store = str(Path(folder) / "store")
        waiting = [
            pool.submit(measure, shape, setting, length, counted, rank, store)
            for rank in range(setting.ranks)
        ]
        ranks = [each.result() for each in waiting]
    multiplied = [each.multiplied for each in ranks]
    return Figures(
        max(each.peak for each in ranks),
        sum(each.seconds for each in ranks),
        sum(each.sent for each in ranks),
        max(multiplied) * len(ranks) / sum(multiplied),
    )


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
    results: dict[str, dict[int, Figures]] = {}
    for setting in (SETTINGS[number - 1] for number in options.settings):
        for length in options.lengths:
            begin = time.perf_counter()
            found = of_all_ranks(shape, setting, length, min(options.lengths))
            results.setdefault(setting.name, {})[length] = found
            seconds = time.perf_counter() - begin
            print(
                f"{setting.name}, {length} tokens: {found.peak:,.0f} bytes per token, "
                f"{found.seconds:.1f} CPU s, {found.sent / 2**20:,.1f} MiB sent, the busiest rank "
                f"multiplies {found.multiplied:.3f} times the mean, {seconds:.0f} s in all",
                flush=True,
            )
    if options.output is not None:
        result = {
            "machine": dataclasses.asdict(this_machine()),
            "versions": versions(["torch"]),
            "shape": dataclasses.asdict(shape),
            "figures": {
                name: {length: dataclasses.asdict(found) for length, found in lengths.items()}
                for name, lengths in results.items()
            },
        }
        write_json(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
