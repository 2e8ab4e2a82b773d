"""Runs on a device that nobody has named in the code: tests/fake_accelerator.

Its kernels are the CPU's, and so are the losses. It fails where a host tensor meets a device
tensor, and notes where values or the progress of the device reach the host.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ds.inference.generate import continue_prompts
from megatron_ds.inference.generation.beam import BeamSearchConfig, beam_search
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from tests.distributed import run_ranks
from tests.e2e.runs import (
    REPOSITORY,
    Launcher,
    Record,
    Run,
    Settings,
    checkpoint_differences,
    evaluations,
    steps,
)
from tests.fake_accelerator import device
from tests.proofs.cases import with_proofs
from tests.unit.inference.models import EOD, model_of, result_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

PROGRAM = REPOSITORY / "tests" / "fake_accelerator" / "run.py"
EVALUATE = REPOSITORY / "tools" / "evaluate.py"
GENERATE = REPOSITORY / "tools" / "generate_samples_gpt.py"
SCHEDULE: Settings = {
    "train_iters": 6,
    "global_batch_size": 4,
    "log_interval": 3,
    "eval_interval": 3,
    "eval_iters": 1,
    "save_interval": 3,
}
INSIDE = ("step 2", "step 5")
"""Steps after which nothing is logged, evaluated or saved, nor after the step before."""
EXPERTS = {"num_experts": 4, "moe_expert_capacity_factor": 1.0, "optimizer": "sgd"}
"""Adam's first steps are g / (|g| + 1e-8): they enlarge the rounding of the smallest gradients, and
experts have some below 1e-8."""
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "zero0": [1, {"zero_stage": 0}],
    "zero1-bf16": [1, {"zero_stage": 1, "bf16": True}],
    "zero1-tp2-experts": [
        2,
        {
            "num_experts": 4,
            "moe_expert_capacity_factor": 1.0,
            "optimizer": "sgd",
            "zero_stage": 1,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ],
    "zero1-ep2-experts": [
        2,
        {
            "num_experts": 4,
            "moe_expert_capacity_factor": 1.0,
            "optimizer": "sgd",
            "zero_stage": 1,
            "expert_model_parallel_size": 2,
        },
    ],
    "zero1-experts": [1, {"zero_stage": 1, "num_experts": 4, "optimizer": "sgd"}],
    "zero1-pp2": [2, {"zero_stage": 1, "pipeline_model_parallel_size": 2}],
    "zero2-offload": [1, {"zero_stage": 2, "cpu_optimizer": True}],
    "zero3-dp2": [2, {"zero_stage": 3}],
}
STAGE3 = {"zero_stage": 3}
COPY = {"event.synchronize megatron_ds/engine/device_batches.py start"}
"""Waits until a pinned buffer has been copied, which was two micro-batches ago."""
WAITS = {
    "zero0": {"item megatron_ds/engine/step.py _is_dropped": 1},
    "zero1-bf16": {"item megatron_ds/engine/deepspeed/flat_gradients.py _step_flat": 1},
    "zero1-ep2-experts": {"copy megatron_ds/model/experts/exchange.py plan": 2},
}
"""The package's waits in a step. The first two layouts decide by the norm whether it is skipped;
elsewhere DeepSpeed does. With expert parallelism each layer waits for the numbers of rows that
ranks exchange."""
READS_OF_DEEPSPEED = {
    "is_invalid_grad_norm",
    "mask_nan_or_inf_with_val_inplace",
    "has_overflow",
    "update_offload_overflow_tracker",
    "get_grad_norm_direct",
    "complete_grad_norm_calculation_for_cpu_offload",
    "_wait_for_offload_copies",
    "independent_gradient_partition_epilogue",
    "_allgather_params_coalesced",
    "wait",
    "get_lst_from_rank0",
    "assert_lst_len_same_as_other_ranks",  # of the trace of stage 3
    "_aggregate_total_loss",  # of pipeline stages
}
"""Functions of DeepSpeed that read values of the device, or wait for it, in each step."""
COUNTED = {
    "streams",
    "stream switches",
    "events recorded",
    "events awaited by streams",
    "record_stream",
    "pinned buffers",
    "pinned bytes",
    "copies from pinned memory",
    "memory statistics",
}


@dataclass(frozen=True)
class Report:
    """What the device noted in a rank."""

    reads: list[tuple[str, str, list[str]]]
    counts: dict[str, int]

    def places(self, *periods: str) -> Counter[str]:
        """Kind and innermost function of the reads in periods."""
        return Counter(
            f"{kind} {stack[0] if stack else 'elsewhere'}"
            for period, kind, stack in self.reads
            if period in periods
        )


def start(
    launcher: Launcher, settings: Settings, folder: Path, ranks: int = 1, **job: Any
) -> tuple[Run, Any]:
    """Starts a program on the device; also returns what reads the reports of its ranks."""
    report = folder / "report"
    job = {"library": str(device.library()), "report": str(report), **job}
    environment = {"DS_ACCELERATOR": device.NAME, "FAKE_ACCELERATOR": json.dumps(job)}
    run = launcher.start(settings, ranks=ranks, script=PROGRAM, environment=environment)

    def reports() -> list[Report]:
        files = (folder / f"report.{rank}" for rank in range(ranks))
        return [Report(**json.loads(file.read_text())) for file in files]

    return run, reports


def reads_inside(reports: Sequence[Report]) -> tuple[set[str], set[str]]:
    """Kinds and places of the reads inside log intervals: the package's, and DeepSpeed's."""
    places = {place for report in reports for place in report.places(*INSIDE)}
    own = {place for place in places if " deepspeed/" not in place}
    return own, places - own


def close_to(records: list[Record], tolerance: float) -> list[Record]:
    return [
        {
            key: pytest.approx(value, rel=tolerance) if isinstance(value, float) else value
            for key, value in record.items()
        }
        for record in records
    ]


OnCpu = Callable[[str], tuple[list[Record], list[Record]]]
"""The steps and evaluations of a layout's run on the CPU."""


@pytest.fixture(scope="module")
def on_cpu(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    """Runs on the CPU, each once, which save no checkpoints."""

    @functools.cache
    def run(name: str) -> tuple[list[Record], list[Record]]:
        ranks, layout = LAYOUTS[name]
        folder = tmp_path_factory.mktemp("cpu")
        written = {"metrics_jsonl": folder / "metrics.jsonl", "save_interval": None}
        launcher.start({**base, **SCHEDULE, **layout, **written}, ranks=ranks).succeed()
        return steps(folder), evaluations(folder)

    return run


@pytest.mark.parametrize("name", with_proofs(LAYOUTS, ["zero1-ep2-experts"]))
def test_a_run_equals_that_on_the_cpu(
    name: str, launcher: Launcher, base: Settings, on_cpu: OnCpu, tmp_path: Path
) -> None:
    """And it reads no value between logs, and waits for nothing but DeepSpeed's own reads.

    Claim (accelerators): between two logs the package reads no value of it, except for the norm
    without ZeRO; streams, events, pinned memory and memory statistics are used

    Claim (accelerators): on a device that no code names, a run has the losses, gradient norms and
    validation losses of the CPU, in each ZeRO stage, with data, tensor and pipeline parallelism and
    with offload
    """
    ranks, layout = LAYOUTS[name]
    settings = {**base, **SCHEDULE, **layout, "save": tmp_path / "run"}
    run, reports = start(launcher, settings, tmp_path, ranks)
    output = run.succeed()

    assert f"on {device.NAME} (fakeccl)" in output
    assert "Warning" not in output
    tolerance = 2e-2 if "bf16" in name else 1e-6  # dropout has another scale in bf16
    for read, expected in zip((steps, evaluations), on_cpu(name), strict=True):
        assert read(tmp_path / "run") == close_to(expected, tolerance)
    assert {count for report in reports() for count in report.counts} >= COUNTED
    own, others = reads_inside(reports())
    waits = WAITS.get(name, {})
    assert own == COPY | waits.keys()
    assert {place.split()[-1] for place in others} <= READS_OF_DEEPSPEED
    assert not (others and name in ("zero0", "zero1-bf16"))  # one wait in all
    places = reports()[0].places("step 2")
    assert {place: places[place] for place in own - COPY} == waits


def on_the_device(rank: int, library: Path) -> tuple[list[str], list[str]]:
    """What the device does not refuse, and the kinds of reads that it notes."""
    from tests.fake_accelerator import accelerator  # imports DeepSpeed

    accelerator.install(library)
    ones = torch.ones(3, 3, device=device.NAME)
    host = torch.ones(3, 3)
    index = torch.tensor([0, 2])
    calls: dict[str, Callable[[], object]] = {
        "addition": lambda: ones + host,
        "addition in place": lambda: host.add_(ones),
        "matrix product": lambda: ones @ host,
        "concatenation": lambda: torch.cat([ones, host]),
        "index": lambda: ones[index],
        "embedding": lambda: torch.nn.functional.embedding(index, ones),
        "numpy": ones.numpy,
        "generator": lambda: ones.normal_(generator=torch.Generator()),
        "communication": lambda: accelerator.host_views([host]),
        "another device": lambda: ones + torch.ones(3, 3, device=f"{device.NAME}:1"),
    }
    accepted = []
    for name, call in calls.items():
        with suppress(RuntimeError, TypeError):
            call()
            accepted.append(name)
    assert ones.device.type == device.NAME
    assert torch.equal((ones * 2.0 + torch.tensor(1.0)).cpu(), host * 3)
    device.READS.noted.clear()
    for read in (
        ones.sum().item,
        ones.tolist,
        ones.cpu,
        ones.nonzero,
        torch.accelerator.synchronize,
    ):
        read()
    assert ones[ones > 0].shape == (9,)
    assert torch.equal(ones, ones)
    places = index.to(device.NAME)  # noted as a copy
    ones[:1] = 2  # three that copy nothing
    ones[0] = 2
    ones[ones > 1] = 2
    ones[0, 0] = 2
    ones[places] = 2
    return accepted, [kind for _, kind, _ in device.READS.noted]


PROMPTS = [[5], [3, 1, 4], [2, 7, 1, 8, 2, 8]]
NEW_TOKENS = 6
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "top-k": {"top_k": 4, "temperature": 0.9},
    "top-p": {"top_p": 0.8},
    "forbidden tokens": {"greedy": True},
}
CHOICE = "copy megatron_ds/inference/generation/engine.py _sample"
BEAMS = "copy megatron_ds/inference/generation/beam.py _best_extensions"
Generated = tuple[list[list[int]], Counter[str], dict[str, int]]
"""Texts, reads by kind and place, and what the device has counted."""


def generate_on(place: str) -> dict[str, Generated]:
    """Texts of a model with grouped queries, for prompts of different lengths."""
    model = model_of("rope-gqa").to(place)
    rules: Any = SimpleNamespace(
        forbidden=lambda token: [7, 8] * (token % 2), ends=lambda *tokens: False
    )

    def sample(name: str) -> list[list[int]]:
        sampling = SamplingParams(**SAMPLING[name])
        own = rules if name == "forbidden tokens" else None
        config = GenerationConfig(NEW_TOKENS, sampling, rules=own)
        return [each.ids for each in continue_prompts(model, PROMPTS, config)]

    def search() -> list[list[int]]:
        config = BeamSearchConfig(NEW_TOKENS, 3, EOD, rules=rules)
        return [each.ids for each in result_of(beam_search(model, PROMPTS[-1], config))]

    outcomes = {}
    for name, run in {
        **{name: partial(sample, name) for name in SAMPLING},
        "beams": search,
    }.items():
        device.READS.noted.clear()
        torch.ops.fakedev.take_counters()
        texts = run()
        counts = dict(torch.ops.fakedev.take_counters())
        outcomes[name] = texts, Report(device.READS.noted, {}).places("start"), counts
    return outcomes


def generate(rank: int, library: Path) -> tuple[dict[str, Generated], dict[str, Generated]]:
    from tests.fake_accelerator import accelerator  # imports DeepSpeed

    accelerator.install(library)
    return generate_on(device.NAME), generate_on("cpu")


def test_decoding_waits_once_for_each_token() -> None:
    """And copies no numbers of the host from memory that is not pinned; top-p waits more often.

    Claim (accelerators): generation from prompts of different lengths with grouped queries, greedy,
    sampled, with forbidden tokens and by beams, has the texts of the CPU, waits once for each token
    (top-p: a few times more), and copies nothing from memory that is not pinned
    """
    ((found, expected),) = run_ranks(generate, 1, device.library())
    reads = {name: each for name, (_, each, _) in found.items()}
    assert reads["top-p"].pop("aten::nonzero megatron_ds/inference/generation/sampling.py draw") > 0
    places = {**dict.fromkeys(SAMPLING, CHOICE), "beams": BEAMS}
    assert reads == {name: {place: NEW_TOKENS} for name, place in places.items()}
    for name, (texts, _, counts) in found.items():
        assert texts == expected[name][0], name
        assert counts["copies from pinned memory"] >= NEW_TOKENS, name


def test_the_device_refuses_host_tensors_and_notes_reads() -> None:
    """Claim (accelerators): host tensors next to its tensors are errors"""
    ((accepted, reads),) = run_ranks(on_the_device, 1, device.library())
    assert accepted == []
    sized = ["aten::nonzero"]
    numbers = ["copy to the device"] * 3  # the index, and what is set by numbers
    assert reads == ["item", "copy", "copy", *sized, "synchronize", *sized, "aten::equal", *numbers]


def test_a_read_in_a_step_is_noted(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    """Claim (accelerators): between two logs the package reads no value of it, except for the norm
    without ZeRO; streams, events, pinned memory and memory statistics are used"""
    run, reports = start(launcher, {**base, **SCHEDULE}, tmp_path, mistake="read")
    run.succeed()
    own, _ = reads_inside(reports())
    assert own == {*COPY, "item megatron_ds/training/trainer.py _step"}


def test_a_host_tensor_in_a_step_is_an_error(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (accelerators): host tensors next to its tensors are errors"""
    run, _ = start(launcher, {**base, **SCHEDULE}, tmp_path, mistake="host tensor")
    result = run.wait()
    assert result.codes == (1,)
    assert "Expected all tensors to be on the same device" in result.output


PLAIN = {"is_plain": True}
"""The device without fp64, streams, pinned memory and a communication backend of its own."""


@pytest.mark.parametrize("name", with_proofs(LAYOUTS, LAYOUTS.keys() - {"zero3-dp2", "zero1-pp2"}))
def test_a_run_on_a_plain_device_equals_that_on_the_cpu(
    name: str, launcher: Launcher, base: Settings, on_cpu: OnCpu, tmp_path: Path
) -> None:
    """Claim (accelerators): on a device without fp64, streams, pinned memory and a communication
    backend, as Apple's GPUs are, a run has the losses and gradient norms of the CPU; sums are in
    fp32, and gloo gets copies"""
    ranks, layout = LAYOUTS[name]
    settings = {**base, **SCHEDULE, **layout, "save": tmp_path / "run"}
    run, _ = start(launcher, settings, tmp_path, ranks, **PLAIN)
    assert f"on {device.NAME} (gloo_copies)" in run.succeed()
    tolerance = 2e-2 if "bf16" in name else 1e-5
    for read, expected in zip((steps, evaluations), on_cpu(name), strict=True):
        assert read(tmp_path / "run") == close_to(expected, tolerance)


def test_a_router_in_fp64_needs_it(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    """Claim (accelerators): --moe-router-dtype fp64 on a device without fp64 is an error at the
    start"""
    settings = {**base, **SCHEDULE, **EXPERTS, "moe_router_dtype": "fp64"}
    result = start(launcher, settings, tmp_path, **PLAIN)[0].wait()
    assert result.codes == (1,)
    assert "fakedev has no fp64" in result.output
    assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def trained(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the device, which saves iterations 3 and 6 in the background."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {**base, **SCHEDULE, **STAGE3, "save": folder, "async_save": True}
    run, _ = start(launcher, settings, folder)
    run.succeed()
    return folder


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    trained: Path, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (accelerators): a run on it resumes bit for bit, and the CPU continues its
    checkpoints"""
    settings = {**base, **SCHEDULE, **STAGE3, "load": trained, "ckpt_step": 3, "save": tmp_path}
    run, _ = start(launcher, settings, tmp_path)
    assert "at iteration 3" in run.succeed()
    assert steps(tmp_path) == steps(trained)[3:]
    assert evaluations(tmp_path) == evaluations(trained)[1:]
    found = checkpoint_differences(trained / "global_step6", tmp_path / "global_step6")
    assert not found, found[:10]


def test_the_cpu_continues_a_run_of_the_device(
    trained: Path, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The files of a checkpoint have no tensors of the device.

    Claim (accelerators): a run on it resumes bit for bit, and the CPU continues its checkpoints
    """
    settings = {**base, **SCHEDULE, **STAGE3, "load": trained, "ckpt_step": 3, "save": tmp_path}
    assert "at iteration 3" in launcher.start(settings).succeed()
    assert steps(tmp_path) == close_to(steps(trained)[3:], 1e-6)


def test_texts_and_perplexity_are_those_of_the_cpu(
    trained: Path, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (accelerators): its texts, greedy and sampled, and its perplexity equal the CPU's"""
    settings = {"load": trained, "prompt": ("1 2 3", "7"), "out_seq_length": 12}
    for how in ({"greedy": True}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}):
        run, _ = start(launcher, {**settings, **how}, tmp_path, program=str(GENERATE))
        on_cpu = launcher.start({**settings, **how}, script=GENERATE)
        assert run.succeed().count("Generated") == 2
        assert run.stdout == on_cpu.succeed()
    files = tmp_path / "device.json", tmp_path / "cpu.json"
    settings = {"load": trained, "valid_data": base["data_path"], "micro_batch_size": 8}
    run, _ = start(launcher, {**settings, "output": files[0]}, tmp_path, program=str(EVALUATE))
    on_cpu = launcher.start({**settings, "output": files[1]}, script=EVALUATE)
    run.succeed()
    on_cpu.succeed()
    found, expected = (json.loads(file.read_text()) for file in files)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_ranks_without_deepspeed_generate_the_same_text(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (accelerators): two ranks without DeepSpeed generate the text of the CPU on it"""
    launcher.start({**base, **SCHEDULE, "zero_stage": 1, "save": tmp_path}).succeed()
    settings = {"load": tmp_path, "prompt": ("1 2 3",), "out_seq_length": 12, "greedy": True}
    job = {"program": str(GENERATE), "without_deepspeed": True}
    run, _ = start(launcher, settings, tmp_path, ranks=2, **job)
    on_cpu = launcher.start(settings, script=GENERATE)
    run.succeed()
    on_cpu.succeed()
    (text,) = re.findall("^Generated: .*$", on_cpu.stdout, re.MULTILINE)
    assert text in run.stdout
