"""A killed and resumed run is bit-identical to an uninterrupted one.

All layouts are killed during the batch-size ramp-up, in the middle of a step, with dropout. Those
of `make proofs` cover every supported pair of a ZeRO stage, data or tensor parallelism, and fp32 or
bf16, both kinds of offload, stage 3 with both kinds of parallelism, and ranks that share every
sequence. Other combinations differ from these only in ways that the tests of several ranks cover.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import REPOSITORY, Launcher, Settings, checkpoint_differences, steps
from tests.tables import tables

TABLES = tables(__file__, tuple)

# Micro-batches of 2 samples. Batches 4 4 4 8 | 8 12 12 12: the checkpoint is that of iteration 4,
# after 20 samples. The kill is in iteration 6, at the second micro-step of two data-parallel ranks,
# the third of one, or the second of 4 samples; the resumed run repeats iteration 5.
SAVED = 4
KILL_POSITION = 32
SCHEDULE: Settings = TABLES["schedule"]

CONVERTER = REPOSITORY / "tools" / "convert_checkpoint" / "ds_to_universal.py"

SKIPPED = 7
GUARD: Settings = {
    "skip_loss_spikes": 0.01,
    "skip_loss_spikes_window": 4,
    "skip_train_iteration_range": f"{SKIPPED}-{SKIPPED}",
}


def zero3(**values: Any) -> dict[str, Any]:
    """Else a small model is not partitioned."""
    return {"stage": 3, "stage3_param_persistence_threshold": 0, **values}


ON_CPU = {"device": "cpu"}
FOLDED = {"pipeline_schedule": "dualpipev", "num_layers": 4, "micro_batch_size": 1}
TP2 = {"tensor_model_parallel_size": 2}
SEQUENCE = {"sequence_parallel": True}
PACKED = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
FP8 = {"fp8_format": "hybrid", "fp8_recipe": "rowwise", "fp8_min_features": 1}
BLOCKS = {"fp8_recipe": "blockwise", "fp8_block_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], Settings]] = {
    "zero0-tp2-packed": (2, {"stage": 0}, {**TP2, **PACKED, "micro_batch_size": 4}),
    "zero1-pp2-fp8-guard": (2, {"stage": 1}, {**PP2, "bf16": True, **FP8, **GUARD}),
    "zero3-dp2-bf16-muon": (2, zero3(), {"bf16": True, "optimizer": "muon"}),
}
"""Ranks, `zero_optimization` of the DeepSpeed file, and further flags."""
MORE: dict[str, tuple[int, dict[str, Any], Settings]] = {
    "zero2-dp2-offload": (2, {"stage": 2, "offload_optimizer": ON_CPU}, {}),
    "zero3-tp2-dp2-bf16-muon": (4, zero3(), {**TP2, **SEQUENCE, "bf16": True, "optimizer": "muon"}),
    "zero1-tp2-fp8-blocks": (2, {"stage": 1}, {**TP2, "bf16": True, **FP8, **BLOCKS}),
    "zero0-dp2": (2, {"stage": 0}, {}),
    "zero1-pp2-dp2-bf16": (4, {"stage": 1}, {**PP2, "bf16": True}),
    "zero3-dp2-sp2": (4, zero3(), {"ds_sequence_parallel_size": 2}),
    "zero1-dp2-bf16": (2, {"stage": 1}, {"bf16": True}),
    "zero1-tp2-lion": (2, {"stage": 1}, {**TP2, **SEQUENCE, "optimizer": "lion"}),
    "zero2-tp2-bf16-guard": (2, {"stage": 2}, {**TP2, "bf16": True, **GUARD}),
    "zero3-dp2-bf16-offload": (
        2,
        zero3(offload_optimizer=ON_CPU, offload_param=ON_CPU),
        {"bf16": True},
    ),
    "zero2-dp2-stochastic": (
        2,
        {"stage": 2},
        {"bf16": True, "bf16_master_weights": True, "bf16_stochastic_round": True},
    ),
    "zero0-folded": (2, {"stage": 0}, {**PP2, **FOLDED}),
    "zero2-cp2-packed": (2, {"stage": 2}, {"context_parallel_size": 2, **PACKED}),
    "zero3-dp2-cp2": (
        4,
        zero3(),
        {"context_parallel_size": 2, "cp_comm_type": ("all_gather", "a2a")},
    ),
}


def run_both(
    launcher: Launcher, settings: Settings, folder: Path, ranks: int, kill_position: int
) -> Path:
    """The folder of a run that is killed in iteration 6 and resumed, and equals another one."""
    full = folder / "full"
    parts = folder / "parts [1]"
    uninterrupted = launcher.start({**settings, "save": full}, ranks=ranks)
    fault = f"micro-batch:{kill_position}:kill-all"
    killed = launcher.start({**settings, "save": parts}, ranks=ranks, fault=fault)
    assert set(killed.wait().codes) == {-9}
    assert [record["iteration"] for record in steps(parts)] == [1, 2, 3, 4, 5]
    output = launcher.start({**settings, "save": parts, "load": parts}, ranks=ranks).succeed()
    assert "UserWarning" not in uninterrupted.succeed()
    assert f"successfully loaded checkpoint from {parts} at iteration {SAVED}" in output
    assert steps(parts) == steps(full)
    last = len(steps(full))
    for step in (SAVED, last):
        found = checkpoint_differences(full / f"global_step{step}", parts / f"global_step{step}")
        assert not found, found[:10]
    return parts


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("zero0-tp2-packed", marks=pytest.mark.smoke),
        *list(LAYOUTS)[1:],
        *(pytest.param(name, marks=pytest.mark.proof) for name in MORE),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    name: str, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (checkpoints): a killed and resumed run equals an uninterrupted one bit for bit"""
    ranks, zero, flags = (LAYOUTS | MORE)[name]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    settings = {**base, **SCHEDULE, **flags, "deepspeed_config": file}
    parts = run_both(launcher, settings, tmp_path, ranks, KILL_POSITION)
    sizes = dict(enumerate([4, 4, 4, 8, 8, 12, 12, 12], 1))
    if "guard" in name:
        del sizes[SKIPPED]
        assert any(record["skipped"] for record in steps(parts) if record["iteration"] > SAVED)
    assert {record["iteration"]: record["global_batch_size"] for record in steps(parts)} == sizes


# Lengths 8 16 16 24 | 24 32 32 32 32 and batches 4 4 4 4 | 8 8 8 8 12; the kill is in iteration
# 6, after 24 samples.
BY_TOKENS: Settings = TABLES["by_tokens"]


def test_token_schedules_resume_bit_for_bit(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (schedules): with a learning rate by tokens, a killed and resumed run equals an
    uninterrupted one bit for bit"""
    settings = {**base, **BY_TOKENS, "zero_stage": 2}
    found = steps(run_both(launcher, settings, tmp_path, 1, kill_position=28))
    for key, expected in (
        ("curriculum_seqlen", [8, 16, 16, 24, 24, 32, 32, 32, 32]),
        ("global_batch_size", [4, 4, 4, 4, 8, 8, 8, 8, 12]),
        ("consumed_tokens", [32, 96, 160, 256, 448, 704, 960, 1216, 1600]),
    ):
        assert [record[key] for record in found] == expected
    rates = [record["learning_rate"] for record in found[:4]]
    assert rates == pytest.approx([0.0, 0.0016, 0.0048, 0.008])


def test_another_global_batch_size_continues_with_the_next_samples(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The same change as --step-batch-size-schedule makes in a run that never stops.

    Claim (checkpoints): a resume with another global batch size continues as
    `--step-batch-size-schedule` does in a run that never stopped, bit for bit
    """
    full = tmp_path / "full"
    parts = tmp_path / "parts"
    settings = {**base, "train_samples": 48, "lr_decay_style": "cosine", "lr_warmup_samples": 16}
    schedule = {"step_batch_size_schedule": "0:4 512:8", "global_batch_size": 8}
    uninterrupted = launcher.start({**settings, **schedule, "save": full})
    first = {**settings, "global_batch_size": 4, "save": parts}
    launcher.start({**first, "exit_interval": 4}).succeed()
    second = {**settings, "global_batch_size": 8, "save": parts, "load": parts}
    output = launcher.start(second).succeed()
    uninterrupted.succeed()

    assert "--global-batch-size is 4 in" in output
    assert "[resume-setting-changed]" in output
    assert [record["global_batch_size"] for record in steps(full)] == [4] * 4 + [8] * 4
    assert steps(parts) == steps(full)
    assert not checkpoint_differences(full / "global_step8", parts / "global_step8")


def test_a_run_continues_on_other_layouts_with_the_same_curve(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Learning rate, batch-size ramp-up, samples and dropout of hidden states are the same, too.

    The second part continues from a universal checkpoint.

    Claim (checkpoints): and so does `pretrain_gpt.py`, from checkpoints and from universal ones,
    with its schedules, ramp-up, samples and dropout of hidden states
    """
    full = tmp_path / "full"
    parts = tmp_path / "parts"
    settings = {**base, **SCHEDULE, "attention_dropout": 0.0, "micro_batch_size": 4}
    launcher.start({**settings, "save": full}).succeed()
    layouts = (
        {**TP2, "zero_stage": 3, "load": full, "ckpt_step": SAVED},
        {**PP2, "zero_stage": 0, "load": parts, "universal_checkpoint": True},
    )
    how = ("tensor model parallel size ", "from the universal checkpoint global_step6_universal")
    for end, layout, text in zip((6, None), layouts, how, strict=True):
        run = {**settings, **layout, "save": parts, "exit_interval": end}
        output = launcher.start(run, ranks=2).succeed()
        assert f"resharding its weights and optimizer states: {text}" in output
        if end is not None:
            folders = [f"--input_folder={parts / f'global_step{end}'}"]
            folders += [f"--output_folder={parts / f'global_step{end}_universal'}"]
            launcher.start(folders, script=CONVERTER).succeed()

    tuned = tmp_path / "tuned"
    run = {"load": parts, "finetune": True, "save": tuned, "seed": 7, "exit_interval": 2}
    launcher.start({**settings, **run}).succeed()
    assert [record["iteration"] for record in steps(tuned)] == [1, 2]
    assert steps(tuned)[0]["lm_loss"] < steps(full)[0]["lm_loss"] - 0.3

    continued = steps(parts)
    expected = steps(full)[SAVED:]
    assert len(continued) == len(expected)
    for ours, theirs in zip(continued, expected, strict=True):
        assert ours == {
            key: value if value is None else pytest.approx(value, rel=1e-5)
            for key, value in theirs.items()
        }


def test_ranks_of_a_sequence_exchange_in_another_way_on_a_resume(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Of a run with Ulysses, first as many ranks, then more. The step in between is skipped: its
    checkpoint has the states that were loaded.

    Claim (checkpoints): a run with DeepSpeed-Ulysses continues under `--context-parallel-size` of
    another size and kind: the states are the same bit for bit, and the curve within 1e-5
    """
    full = tmp_path / "full"
    parts = tmp_path / "parts"
    settings = {
        **base,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "position_embedding_type": "rope",
    }
    settings |= {"global_batch_size": 4, "micro_batch_size": 4, "train_iters": 7}
    settings |= {"zero_stage": 2, "save_interval": 1}
    settings |= {"skip_train_iteration_range": "3-3"}
    launcher.start({**settings, "ds_sequence_parallel_size": 2, "save": full}, ranks=2).succeed()
    exchanges = (
        (2, {"load": full, "ckpt_step": 2, "exit_interval": 4}, "p2p"),
        (
            4,
            {"load": parts, "exit_interval": 5, "cp_comm_type": ("a2a", "all_gather")},
            "a2a and all_gather",
        ),
        (2, {"load": parts, "cp_comm_type": "all_gather"}, "all_gather"),
    )
    for ranks, changes, kind in exchanges:
        run = {**settings, "context_parallel_size": ranks, "save": parts, **changes}
        output = launcher.start(run, ranks=ranks).succeed()
        assert f"context parallel {ranks} ({kind})" in output
    found = checkpoint_differences(full / "global_step3", parts / "global_step3")
    # A rate that a step sets before it uses it.
    assert [name for name in found if not name.endswith("[lr]")] == []
    for ours, theirs in zip(steps(parts), steps(full)[2:], strict=True):
        assert ours == {
            key: value if value is None else pytest.approx(value, rel=1e-5)
            for key, value in theirs.items()
        }


def test_a_run_starts_from_pretrained_weights_and_continues_by_the_same_command(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Also with wrong options, which the checkpoint replaces on request.

    Claim (checkpoints): one command starts from pretrained weights and continues its run bit for
    bit, with options and schedule of the checkpoint over wrong flags
    """
    weights, full, parts = (tmp_path / name for name in ("weights", "full", "parts"))
    settings = {**base, "global_batch_size": 4, "lr_decay_style": "cosine", "train_iters": 4}
    first = {**settings, "train_iters": 2, "save": weights, "no_save_optim": True}
    launcher.start(first, ranks=1).succeed()
    sizes = [path.stat().st_size for path in (weights / "global_step2").glob("*optim_states.pt")]

    rejected = launcher.start({**settings, "load": weights, "save": full}).wait()
    assert (rejected.codes, "checkpoint-without-optimizer" in rejected.output) == ((2,), True)
    tuned = {**settings, "pretrained_checkpoint": weights, "seed": 7}
    output = launcher.start({**tuned, "load": full, "save": full}).succeed()
    assert f"loading checkpoint from {weights}" in output
    with_optimizer = (full / "global_step4").glob("*optim_states.pt")
    assert sum(sizes) < 0.5 * sum(path.stat().st_size for path in with_optimizer)

    command = {**tuned, "load": parts, "save": parts}
    launcher.start({**command, "exit_interval": 2}).succeed()
    wrong = {"num_layers": 7, "lr": 9.0, "lr_decay_style": "constant", "lr_warmup_iters": 3}
    own = {"use_checkpoint_args": True, "use_checkpoint_opt_param_scheduler": True}
    output = launcher.start({**command, **wrong, **own, "load_tag": "global_step2"}).succeed()
    assert f"loading checkpoint from {parts} at iteration 2" in output
    assert output.count("replaced-by-checkpoint") == len(wrong)
    assert [record["iteration"] for record in steps(parts)] == [1, 2, 3, 4]
    assert steps(parts) == steps(full)


def test_sequences_may_grow_on_a_resume(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    """On one process, on another layout, and resumed once more.

    Claim (checkpoints): a run with longer sequences is the same on one process and on another
    layout, and resumes bit for bit
    """
    short, full, other, again = (tmp_path / name for name in ("short", "full", "other", "again"))
    settings = {**base, "position_embedding_type": "rope", "global_batch_size": 4}
    settings |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "train_iters": 6}
    settings |= {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "save_interval": 2}
    launcher.start({**settings, "save": short, "exit_interval": 2}).succeed()
    grown = {**settings, "seq_length": 80, "load": short}
    output = launcher.start({**grown, "save": full}).succeed()
    assert "sequence-length-changed" in output
    launcher.start({**grown, **TP2, "zero_stage": 2, "save": other}, ranks=2).succeed()
    resumed = {**grown, "load": full, "ckpt_step": 4, "save": again}
    assert "sequence-length-changed" not in launcher.start(resumed).succeed()

    assert [record["consumed_tokens"] for record in steps(full)] == [
        256 + 320 * step for step in (1, 2, 3, 4)
    ]
    for one, two in zip(steps(full), steps(other), strict=True):
        assert two["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert two["learning_rate"] == one["learning_rate"]
    assert steps(again) == steps(full)[2:]
    found = checkpoint_differences(full / "global_step6", again / "global_step6")
    assert not found, found[:10]
