"""Plans: ranks, exact counts, suggestions that fit, the tool's outputs and errors."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.parallel.mesh import axis_groups
from megatron_ds.planning.hardware import HARDWARE
from megatron_ds.planning.plan import AXES, Plan, make_plan
from megatron_ds.planning.suggest import MARGIN, suggest
from tests.problems import printed_codes
from tools import plan as tool

LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8 --swiglu "
    "--ffn-hidden-size 28672 --seq-length 4096 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --micro-batch-size 1 "
    "--global-batch-size 1024 --bf16 --tokenizer-type NullTokenizer --vocab-size 128255 "
    "--attention-dropout 0 --hidden-dropout 0 "
)
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--tokenizer-type NullTokenizer --vocab-size 255 "
)


def config_of(line: str, world_size: int) -> Config:
    config = arguments.parse(
        shlex.split(line), world_size=world_size, complete=tool._complete, program="plan.py"
    )
    return config.with_vocab(config.model.vocab_size + 1)


def planned(line: str, world_size: int, hardware: str = "h100") -> Plan:
    return make_plan(config_of(line, world_size), world_size, HARDWARE[hardware])


def test_the_rank_map_is_that_of_the_process_groups() -> None:
    line = f"{SMALL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    plan = planned(f"{line} --ds-sequence-parallel-size 2", 24)
    ranks = list(plan.rank_map())
    groups = axis_groups(24, 2, pp_size=2, sp_size=2)
    assert plan.sizes == {"pp": 2, "dp": 3, "ep": 1, "sp": 2, "tp": 2}
    for axis, number in zip(AXES, range(5), strict=True):
        for group in groups[axis]:
            positions = [ranks[rank] for rank in group]
            assert [each[number] for each in positions] == list(range(len(group)))
            others = {each[:number] + each[number + 1 :] for each in positions}
            assert len(others) == 1


def test_figures_of_a_known_model() -> None:
    """Llama 3 70B has 70.6 billion parameters; Narayanan et al. 2021 give operations and bubble."""
    sizes = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
    plan = planned(LLAMA_70B + sizes, 512)
    assert plan.parameters == 70_553_706_496
    assert sum(plan.rank_parameters) * 8 == pytest.approx(plan.parameters, rel=1e-3)
    assert plan.bubble == 3 / (64 + 3)
    assert plan.flops == pytest.approx(6 * plan.parameters * plan.tokens, rel=0.1)
    assert plan.seconds > plan.compute > 0.9 * plan.flops / 512 / (989e12 * 0.55)
    assert plan.tokens_per_second * plan.seconds == pytest.approx(1024 * 4096)
    assert plan.weights_size == 2 * plan.parameters
    assert plan.checkpoint_size == 14 * plan.parameters
    assert plan.save_seconds == pytest.approx(plan.checkpoint_size / 64 / 2e9)
    assert plan.async_save_seconds == pytest.approx(plan.checkpoint_size / 512 / 25e9)
    inside = {link.traffic.axis: not link.between for link in plan.links}
    assert inside == {"tp": True, "dp_sp": False, "pp": False}


def test_slower_links_and_stages_of_unequal_length_take_longer() -> None:
    even, uneven = (
        planned(f"{SMALL} --pipeline-model-parallel-size 2 --pp-partition-method {method}", 2)
        for method in ("2,2", "1,3")
    )
    assert uneven.compute > 1.2 * even.compute
    near, far = (planned(f"{SMALL} --zero-stage 1", ranks, "a100") for ranks in (8, 16))
    assert far.exposed > 1.5 * near.exposed > 0


def test_suggestions_fit_and_are_sorted() -> None:
    config = config_of(LLAMA_70B, 512)
    found = suggest(config, 512, HARDWARE["h100"])
    assert len(found) > 5
    seconds = [each.plan.seconds for each in found]
    assert seconds == sorted(seconds)
    for each in found:
        assert each.plan.memory.peak <= MARGIN * 80e9
        assert each.plan.samples == 1024
        again = planned(f"{LLAMA_70B.replace('--micro-batch-size 1', '')} {each.flags}", 512)
        assert (again.seconds, again.memory.peak) == (each.plan.seconds, each.plan.memory.peak)
    assert not suggest(config, 2, HARDWARE["h100"])


def test_suggestions_offload_what_does_not_fit() -> None:
    config = config_of(LLAMA_70B.replace("--global-batch-size 1024", "--global-batch-size 64"), 8)
    first = suggest(config, 8, HARDWARE["h100"])[0]
    assert "--zero-stage 3" in first.flags
    assert "--cpu-optimizer" in first.flags
    assert first.plan.memory.host
    assert first.plan.optimizer > sum(first.plan.memory.host.values()) / 25e9


def test_suggestions_partition_experts_and_long_sequences() -> None:
    experts = config_of(f"{SMALL} --num-experts 4 --global-batch-size 64", 64)
    flags = [each.flags for each in suggest(experts, 64, HARDWARE["h100"])]
    assert any("--expert-model-parallel-size 4" in each for each in flags)
    line = SMALL.replace("--seq-length 32", "--seq-length 1048576 --position-embedding-type rope")
    line = line.replace("heads 4", "heads 8")
    split = f"{line} --bf16 --global-batch-size 1 --ds-sequence-parallel-size"
    long = config_of(f"{split} 8", 8)
    small = dataclasses.replace(HARDWARE["h100"], memory=4e9)
    first = suggest(long, 8, small)[0]
    assert "--ds-sequence-parallel-size 8" in first.flags
    assert first.plan.memory.peak < 4e9


def test_the_tool_prints_a_page_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "memory.svg"
    line = f"--world-size 65536 {SMALL} --global-batch-size 65536 --tokens 1e12"
    tool.main([*shlex.split(line), "--suggest", "--plot", str(picture)])
    page = capsys.readouterr().out
    for part in ("rank 3", "peak", "all-reduce", "1e+12 tokens", "--zero-stage 1"):
        assert part in page
    assert "<svg" in picture.read_text("utf-8")

    tool.main([*shlex.split(line), "--json", "--hardware", "a100"])
    values = json.loads(capsys.readouterr().out)
    assert len(values["rank_map"]["ranks"]) == 65536
    assert values["ds_config"]["train_batch_size"] == 65536
    assert values["memory"]["peak"] == max(values["memory"]["phases"].values())


def test_rates_are_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rates.json"
    file.write_text('{"name": "mine", "tflops_32": 2, "efficiency": 0.25, "per_machine": 3}')
    line = [*shlex.split(SMALL), "--json", "--hardware", "cpu", "--rates", str(file)]
    tool.main(line)
    hardware = json.loads(capsys.readouterr().out)["hardware"]
    given = {"tflops_32": 2, "efficiency": 0.25, "per_machine": 3}
    assert hardware == {**vars(HARDWARE["cpu"]), **given}
    for content in ("[]", "{", '{"speed": 1}', '{"efficiency": 0}', '{"efficiency": "x"}'):
        file.write_text(content)
        with pytest.raises(SystemExit):
            tool.main(line)
        assert printed_codes(capsys.readouterr().err) == ["rates-unreadable"]


def test_a_dry_run_is_planned_for_its_processes(capsys: pytest.CaptureFixture[str]) -> None:
    tool.main([*shlex.split(SMALL), "--dry-run", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["world_size"] == 4


def test_problems_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(shlex.split("--device-memory 80Gx --hardware h1000"))
    assert printed_codes(capsys.readouterr().err) == ["invalid-choice", "not-a-size"]
    with pytest.raises(SystemExit):
        tool.main(shlex.split(f"--world-size 7 {SMALL} --tensor-model-parallel-size 2"))
    assert printed_codes(capsys.readouterr().err) == ["world-size-not-divisible"]
