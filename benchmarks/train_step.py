#!/usr/bin/env python
"""Training step time compared with a bare loop over GPT-2 in plain PyTorch and in transformers.

Each contender trains the same model (6 layers, hidden size 256, 8 heads, tied embeddings) on the
same tokens in its own process. The processes run in turn; ratios are medians over rounds. The
matrix multiplication rate of the machine is measured in the same rounds, to compute the model FLOPs
utilization (MFU), with all of attention as in the training log, and with the half that Megatron-LM
counts for the causal mask.

On a CPU without instructions for bf16, torch's own bf16 products take about thirty times as long as
fp32. There all contenders, and the products that are measured alone, compute them as training does:
in fp32, rounded once. The title of the table says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
)

OURS = "megatron_ds"
COMPILED = "megatron_ds --compile"
BARE = "plain PyTorch"
BARE_COMPILED = "plain PyTorch, torch.compile"
PLAIN = "transformers"
PLAIN_COMPILED = "transformers, torch.compile"
DEEPSPEED = "transformers, DeepSpeed ZeRO-1"
PRODUCTS = "products and attention alone"
MATMUL = "matmul"
MATRIX = 2048
LR = 1e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0


@dataclass(frozen=True)
class Shape:
    """The model and its micro-batch."""

    layers: int = 6
    hidden: int = 256
    heads: int = 8
    sequence: int = 256
    vocab: int = 50304
    micro_batch: int = 8


@dataclass(frozen=True)
class Setting:
    """Settings of all contenders of a table."""

    shape: Shape
    dtype: str
    threads: int


@dataclass(frozen=True)
class Report:
    """Measurements of a contender in one round."""

    seconds: list[float]
    cpu_seconds: list[float]
    """CPU time of all threads, which varies less than wall time on a busy machine."""
    loss: float | None
    peak_mib: float


@dataclass(frozen=True)
class Target:
    """Upper bound of the ratio of two contenders' step times."""

    dtype: str
    ours: tuple[str, ...]
    """The fastest of them is compared."""
    peers: tuple[str, ...]
    """Compared with the fastest of them."""
    bound: float


TARGETS = (
    Target("fp32", (OURS,), (PLAIN, DEEPSPEED), 1.0),
    Target("bf16", (OURS,), (PLAIN,), 0.85),
    Target("bf16", (COMPILED,), (PLAIN,), 0.7),
    Target("fp32", (OURS, COMPILED), (BARE_COMPILED,), 0.8),
    Target("bf16", (OURS, COMPILED), (BARE_COMPILED,), 0.75),
)


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    threads = options.threads
    shape = Shape()
    result: dict[str, Any] = {
        "machine": dataclasses.asdict(this_machine()),
        "versions": versions(("torch", "deepspeed", "transformers", "numpy")),
        "settings": {
            "shape": dataclasses.asdict(shape),
            "threads": threads,
            "rounds": options.rounds,
            "steps": options.steps,
            "model_flops_per_step": flops_per_step(shape),
            "causal_model_flops_per_step": flops_per_step(shape, is_causal=True),
        },
        "tables": [],
    }
    if options.experts:
        from benchmarks import expert_steps

        result["experts"] = list(
            expert_steps.measure_experts(
                options.against, options.dtype, options.rounds, options.steps
            )
        )
        result["settings"] |= {"shape": dataclasses.asdict(expert_steps.SHAPE), "threads": 1}
    elif options.cases is None:
        for dtype in options.dtype:
            table = measure(
                Setting(shape, dtype, threads),
                {OURS: contenders(False)[OURS]} if options.ours else contenders(options.compile),
                rounds=options.rounds,
                steps=options.steps,
            )
            result["tables"].append(table)
            show(table, result)
    else:
        from benchmarks import layout_steps

        result["cases"] = list(
            layout_steps.measure_cases(
                options.cases, options.dtype, options.rounds, options.steps, options.against
            )
        )
        result["settings"] |= {"shape": dataclasses.asdict(layout_steps.SHAPE), "threads": 1}
    if options.output is not None:
        write_json(options.output, result)
        print(f"wrote {options.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=_positive, default=5, help="number of rounds")
    add("--steps", type=_positive, default=3, help="training steps per contender and round")
    add("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    add("--threads", type=_positive, default=2, help="threads per contender")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure both models with torch.compile (about two minutes per dtype)",
    )
    add("--ours", action="store_true", help="measure only megatron_ds, without --compile")
    add(
        "--cases",
        nargs="*",
        metavar="CASE",
        help="instead, measure --compile in layouts of two ranks (all, or these)",
    )
    add("--experts", action="store_true", help="instead, measure a model of 32 experts")
    add("--against", type=Path, help="with --cases, --experts: another checkout of this project")
    add("--output", type=Path, help="output file (JSON)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def contenders(compiled: bool) -> dict[str, Callable[[Setting], Work]]:
    """Return the function that builds each contender's work, in the order of a round."""
    eager: dict[str, Callable[[Setting], Work]] = {
        OURS: functools.partial(build_ours, compiled=False),
        BARE: functools.partial(build_plain, compiled=False),
        PLAIN: functools.partial(build_transformers, compiled=False),
        DEEPSPEED: build_deepspeed,
        PRODUCTS: build_products,
    }
    if not compiled:
        return eager
    return eager | {
        COMPILED: functools.partial(build_ours, compiled=True),
        BARE_COMPILED: functools.partial(build_plain, compiled=True),
        PLAIN_COMPILED: functools.partial(build_transformers, compiled=True),
    }


def measure(
    setting: Setting,
    builders: dict[str, Callable[[Setting], Work]],
    *,
    rounds: int,
    steps: int,
    matrix: int = MATRIX,
) -> dict[str, Any]:
    """Measure the contenders for one dtype: their figures, the matmul rate and the ratios."""
    trainers = [Contender(name, build, setting) for name, build in builders.items()]
    product = Contender(MATMUL, build_matmul, setting, matrix)
    running = [*trainers, product]
    try:
        in_turn(running, 1, 1)  # compiles and warms up
        *reports, products = in_turn(running, rounds, steps)
    finally:
        for contender in running:
            contender.close()
    rate = 2 * matrix**3 / statistics.median(flatten(report.seconds for report in products))
    by_name = dict(zip(builders, reports, strict=True))
    flops, causal_flops = (flops_per_step(setting.shape, is_causal=x) for x in (False, True))
    tokens = setting.shape.micro_batch * setting.shape.sequence
    return {
        "dtype": setting.dtype,
        "products_in_fp32": has_fp32_products(setting.dtype),
        "matmul_gflops": rate / 1e9,
        "contenders": [
            summary(name, kept, flops=flops, tokens=tokens, rate=rate)
            | {"causal_mfu": causal_flops / step_seconds(kept) / rate}
            for name, kept in by_name.items()
        ],
        "ratios": ratios(setting.dtype, by_name),
    }


def summary(
    name: str, reports: Sequence[Report], *, flops: int, tokens: int, rate: float
) -> dict[str, Any]:
    """Return the figures of a contender.

    Args:
        name: Name of the contender.
        reports: Its reports by round.
        flops: Model FLOPs per step.
        tokens: Tokens per step.
        rate: Matmul rate of the machine in FLOP/s.
    """
    seconds = step_seconds(reports)
    return {
        "name": name,
        "step_seconds": seconds,
        "cpu_seconds": statistics.median(flatten(report.cpu_seconds for report in reports)),
        "tokens_per_second": tokens / seconds,
        "model_gflops": flops / seconds / 1e9,
        "mfu": flops / seconds / rate,
        "peak_mib": max(report.peak_mib for report in reports),
        "last_loss": reports[-1].loss,
        "rounds": [report.seconds for report in reports],
    }


def step_seconds(reports: Sequence[Report]) -> float:
    return statistics.median(flatten(report.seconds for report in reports))


def ratios(dtype: str, reports: dict[str, list[Report]]) -> list[dict[str, Any]]:
    """Return the ratios of our step times to each peer's, with the targets that apply."""
    wall = {name: [report.seconds for report in kept] for name, kept in reports.items()}
    cpu = {name: [report.cpu_seconds for report in kept] for name, kept in reports.items()}
    found: list[dict[str, Any]] = []
    for ours in (OURS, COMPILED, PRODUCTS):
        for peer in (BARE, BARE_COMPILED, PLAIN, DEEPSPEED, PLAIN_COMPILED):
            if ours not in wall or peer not in wall:
                continue
            if ours == PRODUCTS and peer != BARE_COMPILED:
                continue
            found.append(
                {
                    "ours": ours,
                    "peer": peer,
                    "step": paired_ratio(wall[ours], wall[peer]),
                    "cpu": paired_ratio(cpu[ours], cpu[peer]),
                    "target": None,
                }
            )
    for target in TARGETS:
        judged = [
            pair
            for pair in found
            if dtype == target.dtype
            and pair["ours"] in target.ours
            and pair["peer"] in target.peers
        ]
        if judged:
            fastest = min(judged, key=lambda pair: pair["step"])["ours"]
            own = [pair for pair in judged if pair["ours"] == fastest]
            max(own, key=lambda pair: pair["step"])["target"] = target.bound
    return found


def flatten(lists: Iterator[list[float]]) -> list[float]:
    return [value for values in lists for value in values]


def flops_per_step(shape: Shape, *, is_causal: bool = False) -> int:
    """Return the model FLOPs of forward and backward, as in the training log.

    Args:
        shape: Shape of the model and the micro-batch.
        is_causal: The causal mask halves attention, as in Megatron-LM's program.
    """
    from megatron_ds.model.declaration.architecture import model_spec

    config = dataclasses.replace(_model_config(shape), make_vocab_size_divisible_by=1)
    return shape.micro_batch * model_spec(config).flops(shape.sequence, is_causal=is_causal)


def show(table: dict[str, Any], result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    threads = result["settings"]["threads"]
    title = f"{table['dtype']}, {threads} threads, matmul {table['matmul_gflops']:.0f} GFLOP/s"
    if table["products_in_fp32"]:
        title += ", products of all contenders in fp32"
    figures = Table(title=title)
    rates = "tokens/s", "GFLOP/s", "MFU", "MFU as Megatron-LM counts"
    for column in ("contender", "s/step", "CPU s/step", *rates, "peak MiB"):
        figures.add_column(column, justify="left" if column == "contender" else "right")
    for row in table["contenders"]:
        figures.add_row(
            row["name"],
            f"{row['step_seconds']:.3f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['model_gflops']:.0f}",
            f"{row['mfu']:.0%}",
            f"{row['causal_mfu']:.0%}",
            f"{row['peak_mib']:.0f}",
        )
    pairs = Table(title="step time ratio, ours / peer (paired rounds)")
    for column in ("ours", "peer", "wall", "CPU", "target"):
        pairs.add_column(column, justify="right" if column in ("wall", "CPU", "target") else "left")
    for pair in table["ratios"]:
        bound = pair["target"]
        verdict = "" if bound is None else f"{bound} {'met' if pair['step'] <= bound else 'MISSED'}"
        pairs.add_row(
            pair["ours"], pair["peer"], f"{pair['step']:.3f}", f"{pair['cpu']:.3f}", verdict
        )
    console = Console()
    console.print(figures)
    console.print(pairs)


class Training:
    """Work of a contender: training steps on the same tokens for every contender."""

    def __init__(self, shape: Shape, step: Callable[[Any, Any], float]) -> None:
        """Create the work.

        Args:
            shape: Shape of the model and the micro-batch.
            step: Trains on token ids and labels [B, S] and returns the loss.
        """
        self._shape = shape
        self._step = step
        self._num_steps = 0

    def __call__(self, count: int) -> Report:
        """Measure `count` steps after a warm-up step, since an idle process starts slowly."""
        seconds = []
        cpu_seconds = []
        loss = float("nan")
        for _ in range(count + 1):
            tokens, labels = self._next_batch()
            start = time.perf_counter()
            cpu_start = time.process_time()
            loss = self._step(tokens, labels)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        return Report(seconds[1:], cpu_seconds[1:], loss, _peak_mib())

    def _next_batch(self) -> tuple[Any, Any]:
        import torch

        generator = torch.Generator().manual_seed(self._num_steps)
        self._num_steps += 1
        shape = (self._shape.micro_batch, self._shape.sequence + 1)
        ids = torch.randint(self._shape.vocab, shape, generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_ours(setting: Setting, *, compiled: bool) -> Work:
    """Build our engine with ZeRO-1 on one process."""
    device = start_process_group(setting.threads, setting.dtype)
    from megatron_ds.engine.build import build_engine
    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.train_state import StepPlan

    engine = build_engine(our_config(setting, compiled=compiled), Mesh.build(1), device)
    size = setting.shape.micro_batch
    plan = StepPlan(
        iteration=1,
        global_batch_size=size,
        num_micro_batches=1,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        seq_length=setting.shape.sequence,
    )

    def step(tokens: Any, labels: Any) -> float:
        batch = DeviceBatch(tokens.to(device), labels.to(device), None, position=0)
        return float(engine.train_step(iter([batch]), plan).loss)

    return Training(setting.shape, step)


def build_plain(setting: Setting, *, compiled: bool) -> Work:
    """Build GPT-2 in plain PyTorch in a bare loop; torch.compile compiles the whole model."""
    device = _start_peer(setting)
    from benchmarks.plain_gpt2 import GPT2

    shape = setting.shape
    model = GPT2(shape.layers, shape.hidden, shape.heads, shape.sequence, shape.vocab).to(device)
    return _bare_loop(setting, model, model, device, compiled=compiled)


def build_transformers(setting: Setting, *, compiled: bool) -> Work:
    """Build transformers' GPT-2 in a bare loop."""
    device = _start_peer(setting)
    model = transformers_gpt2(setting.shape).to(device)
    loss_of = functools.partial(transformers_loss, model)
    return _bare_loop(setting, model, loss_of, device, compiled=compiled)


def _bare_loop(
    setting: Setting, model: Any, loss_of: Callable[..., Any], device: Any, *, compiled: bool
) -> Work:
    import torch

    from benchmarks.plain_gpt2 import training_step

    step = training_step(
        model,
        torch.compile(loss_of) if compiled else loss_of,
        device=device,
        dtype=setting.dtype,
        lr=LR,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        clip=CLIP,
    )
    return Training(setting.shape, lambda tokens, labels: float(step(tokens, labels)))


def build_deepspeed(setting: Setting) -> Work:
    """Build transformers' GPT-2 in a ZeRO-1 engine; bf16 weights have fp32 master copies."""
    device = _start_peer(setting)
    import deepspeed

    adam = {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY, "torch_adam": True}
    model = transformers_gpt2(setting.shape)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": setting.shape.micro_batch,
            "gradient_clipping": CLIP,
            "steps_per_print": 1 << 30,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": setting.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": adam},
        },
    )

    def step(tokens: Any, labels: Any) -> float:
        loss = transformers_loss(engine, tokens.to(device), labels.to(device))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return Training(setting.shape, step)


def build_products(setting: Setting) -> Work:
    """Build the matrix products and attention of a step without anything else.

    No step of this model can take less time with these kernels, whatever is fused around them.
    """
    device = start_process_group(setting.threads, setting.dtype)
    import torch
    import torch.nn.functional as F

    shape = setting.shape
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    tokens = shape.micro_batch * shape.sequence
    hidden = shape.hidden

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    widths = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    layer = [(draw(tokens, rows), draw(rows, columns)) for rows, columns in widths]
    head = [(draw(tokens, hidden), draw(shape.vocab, hidden).t())]
    size = (shape.micro_batch, shape.heads, shape.sequence, hidden // shape.heads)
    q, k, v = (draw(*size).requires_grad_() for _ in range(3))

    def step(*tokens_and_labels: torch.Tensor) -> float:
        for x, weight in [*layer * shape.layers, *head]:
            y = x @ weight
            torch.mm(y, weight.t())
            torch.mm(x.t(), y)
        for _ in range(shape.layers):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(attended, (q, k, v), attended)
        return float(attended.detach()[0, 0, 0, 0])

    return Training(shape, step)


def build_matmul(setting: Setting, size: int) -> Work:
    """Build square matrix multiplications, the practical peak of the machine."""
    device = start_process_group(setting.threads, setting.dtype)
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[setting.dtype]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def work(count: int) -> Report:
        seconds = []
        cpu_seconds = []
        for _ in range(5 * count):
            start = time.perf_counter()
            cpu_start = time.process_time()
            torch.mm(a, b, out=out)
            float(out[0, 0])
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        return Report(seconds, cpu_seconds, None, _peak_mib())

    return work


def our_config(setting: Setting, *, compiled: bool) -> Any:
    """Return the configuration of our contender."""
    from megatron_ds import config

    return config.Config(
        model=_model_config(setting.shape),
        optimizer=config.OptimizerConfig(
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=CLIP,
        ),
        schedule=config.ScheduleConfig(micro_batch_size=setting.shape.micro_batch),
        precision=config.PrecisionConfig(bf16=setting.dtype == "bf16"),
        deepspeed=config.DeepSpeedConfig(zero_stage=1),
        runtime=config.RuntimeConfig(compile=compiled),
    )


def _model_config(shape: Shape) -> Any:
    from megatron_ds.config import ModelConfig

    return ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        seq_length=shape.sequence,
        vocab_size=shape.vocab,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def start_process_group(threads: int, dtype: str = "fp32") -> Any:
    """Set up a process group of one process.

    Args:
        threads: Number of threads.
        dtype: What the contender computes in. Slow products of bf16 are replaced as in training.

    Returns:
        The device.
    """
    from megatron_ds.config import RuntimeConfig
    from megatron_ds.launch import environment
    from megatron_ds.launch.ranks import distributed

    environment.prepare_environment()
    here = distributed.init_distributed(RuntimeConfig())
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1234)
    if dtype == "bf16":
        from megatron_ds.model.kernels.half_products import replace_slow_products

        replace_slow_products(torch.bfloat16, here.device)
    return here.device


def has_fp32_products(dtype: str) -> bool:
    """Whether the products of a dtype are computed in fp32, as on a CPU without bf16."""
    import torch

    from megatron_ds.config.devices import is_host
    from megatron_ds.launch import device
    from megatron_ds.model.kernels.half_products import has_instructions

    return dtype == "bf16" and is_host(device.kind()) and not has_instructions(torch.bfloat16)


def _start_peer(setting: Setting) -> Any:
    """Set up a peer: like ours, without the transparent huge pages that our runtime enables.

    Exporting THP_MEM_ALLOC_ENABLE=1 enables them for all contenders.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "0")
    return start_process_group(setting.threads, setting.dtype)


def transformers_gpt2(shape: Shape) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel._from_config(
        GPT2Config(
            vocab_size=shape.vocab,
            n_positions=shape.sequence,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        ),
        attn_implementation="sdpa",
    ).train()


def transformers_loss(model: Any, tokens: Any, labels: Any) -> Any:
    """Compute the loss over all positions, as ours does; `labels` alone would drop the last one."""
    return model(input_ids=tokens, labels=tokens, shift_labels=labels).loss


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    raise SystemExit(main())
