"""The generated DeepSpeed configuration: complete, and accepted by DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.engine.ds_config.generate import build_ds_config, cpp_ops
from tests.problems import codes
from tests.tables import tables
from tests.unit.engine.ds_files import FLAGS_OF, ROOT, SHIPPED, Merge, merged

TABLES = tables(__file__)

GOLDEN = ROOT / "tests" / "golden" / "ds_configs"


def generated(path: Path) -> object:
    config, problems, warnings = merged(f"{FLAGS_OF.get(path.stem, '')} --deepspeed_config {path}")
    assert (problems, warnings) == ([], [])
    return build_ds_config(config, dp_size=2)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_gives_golden_config_which_gives_itself(path: Path) -> None:
    """python tests/unit/engine/test_ds_config.py rewrites the golden files."""
    assert (
        generated(path)
        == generated(GOLDEN / path.name)
        == json.loads((GOLDEN / path.name).read_text())
    )


def test_file_of_every_stage_and_offload_is_shipped() -> None:
    stages = ["zero0", "zero1", "zero2", "zero2_offload", "zero3"]
    at_stage_3 = ["zero3_hpz", "zero3_nvme", "zero3_offload"]
    assert [path.stem for path in SHIPPED] == [*stages, *at_stage_3]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_only_offload_needs_cpp_ops(path: Path) -> None:
    """Claim (command-line): only runs with offload build C++ ops, with a message on every process
    that waits"""
    generated = json.loads((GOLDEN / path.name).read_text())
    offload = {"cpu_adam"} if path.stem.endswith(("_offload", "_nvme")) else set()
    disk = {"async_io"} if path.stem.endswith("_nvme") else set()
    assert {op.name for op in cpp_ops(generated)} == offload | disk


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_deepspeed_accepts_generated_config(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    # DeepSpeed checks the batch sizes against its own world size, which is 1 here.
    config = merged(f"{FLAGS_OF.get(path.stem, '')} --deepspeed_config {path}").config
    read_back = DeepSpeedConfig(build_ds_config(config, dp_size=1))
    assert read_back.train_batch_size == 16
    assert read_back.gradient_accumulation_steps == 8
    assert read_back.zero_config.stage == json.loads(path.read_text())["zero_optimization"]["stage"]
    generated = config.deepspeed
    assert read_back.zero_config.zero_hpz_partition_size == generated.zero_hpz_partition_size
    for device, block in (
        (generated.optimizer_offload, read_back.zero_config.offload_optimizer),
        (generated.param_offload, read_back.zero_config.offload_param),
    ):
        assert device == ("none" if block is None else block.device)
        assert device != "nvme" or str(block.nvme_path) == generated.nvme_path


def test_flags_decide_without_a_file() -> None:
    config, problems, _ = merged("--clip-grad 0.5 --bf16 --zero-stage 2")
    assert problems == []
    result = build_ds_config(config, 2)
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [result[key] for key in batch] == [16, 2, 4]
    assert result["gradient_clipping"] == 0.5
    assert (result["bf16"]["enabled"], result["fp16"]["enabled"]) == (True, False)
    assert result["data_types"]["grad_accum_dtype"] == "fp32"
    assert result["zero_optimization"]["stage"] == 2
    assert result["optimizer"]["params"] == TABLES["optimizer"]


def test_reduction_bucket_is_at_most_the_model_size(merge: Merge) -> None:
    def bucket_size(value: object) -> int:
        config = merge({"zero_optimization": {"reduce_bucket_size": value}}).config
        zero = build_ds_config(config.with_vocab(1000), 2)["zero_optimization"]
        return int(zero["reduce_bucket_size"])

    assert 1000 * 64 < bucket_size("auto") < 1_000_000
    assert bucket_size(5e7) == 5e7


def zero_block(flags: str, device: str, dp_size: int = 2) -> dict[str, Any]:
    block: dict[str, Any] = build_ds_config(merged(flags).config, dp_size, device)[
        "zero_optimization"
    ]
    return block


@pytest.mark.parametrize(("flags", "device", "dp_size", "overlaps"), TABLES["overlaps"])
def test_reduction_overlaps_with_the_backward_pass_where_it_pays(
    flags: str, device: str, dp_size: int, overlaps: bool
) -> None:
    assert zero_block(flags, device, dp_size)["overlap_comm"] is overlaps


@pytest.mark.parametrize(
    ("torch", "flags", "expected"), TABLES["old_torch_compiles_no_memory_efficient_linear"]
)
def test_old_torch_compiles_no_memory_efficient_linear(
    torch: str, flags: str, expected: bool, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: torch)
    key = "memory_efficient_linear"
    assert zero_block(f"--zero-stage 3 {flags}", "cpu")[key] is expected
    given = {"zero_optimization": {"stage": 3, key: True}}
    problems = merge(given, flags).problems
    assert codes(problems) == ([] if expected else ["ds-value-invalid"])


def test_bucket_is_bounded_in_bytes_and_small_where_it_is_sent_early() -> None:
    sizes = TABLES["sizes"]
    for flags, size in sizes.items():
        assert zero_block(flags, "xpu")["reduce_bucket_size"] == size
    assert zero_block("--zero-stage 3", "xpu", 64)["reduce_bucket_size"] == 64_000_000


def test_overlapped_bucket_of_stage_2_holds_the_largest_parameter(merge: Merge) -> None:
    def block(values: dict[str, Any]) -> tuple[bool, int]:
        merged_config = merge({"zero_optimization": {"stage": 2, **values}}).config
        # The embedding has 64 million elements.
        zero = build_ds_config(merged_config.with_vocab(1_000_000), 2, "xpu")["zero_optimization"]
        return zero["overlap_comm"], int(zero["reduce_bucket_size"])

    overlaps, size = block({})
    assert overlaps
    assert 64_000_000 <= size < 65_000_000
    assert block({"reduce_bucket_size": 5e7}) == (False, 50_000_000)
    assert block({"reduce_bucket_size": 7e7}) == (True, 70_000_000)
    assert block({"reduce_bucket_size": 5e7, "overlap_comm": True}) == (True, 50_000_000)


def test_offloaded_states_are_pinned_on_an_accelerator(merge: Merge) -> None:
    flags = "--zero-stage 3 --cpu-optimizer --remote-device cpu"
    for device, is_pinned in (("cpu", False), ("xpu", True)):
        zero = zero_block(flags, device)
        pinned = {"device": "cpu", "pin_memory": is_pinned}
        assert zero["offload_optimizer"] == {**pinned, "ratio": 1.0}
        assert zero["offload_param"] == pinned
    block = {"device": "cpu", "pin_memory": False}
    file = {"zero_optimization": {"stage": 2, "offload_optimizer": block}}
    zero = build_ds_config(merge(file).config, 2, "xpu")["zero_optimization"]
    assert zero["offload_optimizer"] == block


if __name__ == "__main__":
    for path in SHIPPED:
        (GOLDEN / path.name).write_text(json.dumps(generated(path), indent=2) + "\n")
