"""Flags of other programs are written in the form of this one, and real differences are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ds.cli.doctor.commands import read_source
from megatron_ds.cli.doctor.counterparts import with_counterparts
from megatron_ds.cli.doctor.diagnosis import Diagnosis, diagnose
from megatron_ds.cli.doctor.frameworks import TrainingCommand
from megatron_ds.cli.doctor.transfer import with_transfer
from megatron_ds.cli.flags import training_flags
from megatron_ds.cli.scan import scan
from megatron_ds.doctor import command as doctor
from tests.problems import codes

SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
)
WRITTEN = {
    "--interleave-sliding-window 4096": "--window-size 4095,0 --window-attn-skip-freq 2",
    "--sliding-window=128": "--window-size 127,0",
    "--query-pre-attn-scalar 256": "--softmax-scale 0.0625",
    "--num-layers 27 --first-k-dense-replace 1 --moe-layer-freq 1": (
        "--num-layers 27 --moe-layer-freq [0]*1+[1]*26"
    ),
    "--num-layers 6 --first_k_dense_replace 1 --moe-layer-freq 2": (
        "--num-layers 6 --moe-layer-freq [0,0,1,0,1,0]"
    ),
    "--n-shared-experts 2 --moe-intermediate-size 1408": (
        "--moe-intermediate-size 1408 --moe-shared-expert-intermediate-size 2816"
    ),
    "--hidden-size 2304 --input-embeds-norm": "--hidden-size 2304 --embedding-multiplier 48",
    "--num-layers 4 --scale-depth 1.4": "--num-layers 4 --residual-multiplier 0.7",
    "--hidden-size 64 --dim-model-base 16": "--hidden-size 64 --logits-multiplier 0.25",
    "--tokenizer-type MixtralTokenizer --tokenizer-model t": (
        "--tokenizer-model t --tokenizer-type HFTokenizer"
    ),
    "--tokenizer-type MixtralTokenizer": "--tokenizer-type MixtralTokenizer",
    "--gelu-tanh": "--activation geglu --gelu-approximation tanh",
    # Without a value, or without what it follows from.
    "--first-k-dense-replace 1": "--first-k-dense-replace 1",
    "--n-shared-experts $N": "--n-shared-experts $N",
}


FORK = "--deepspeed --num-layers 32 --hidden-size 2560 --num-attention-heads 32"
TRANSFERRED = {
    # The commands that bigscience published, and their defaults.
    "--mup --mup-input-mult 10 --mup-output-mult 10 --mup-attn-mult 10": (
        "--use-mup --mup-base-hidden-size 128 --mup-independent-weight-decay "
        "--mup-embedding-mult 10 --mup-base-head-dim 100 --mup-output-mult 0.00390625"
    ),
    "--mup": (
        "--use-mup --mup-base-hidden-size 128 --mup-independent-weight-decay "
        "--mup-output-mult 0.000390625"
    ),
    # The factor of the logits that muP has here.
    "--mup_output_mult=512 --mup --mup-base-hidden-size 256 --mup-base-ffn-hidden-size 1024": (
        "--use-mup --mup-base-hidden-size 512 --mup-independent-weight-decay"
    ),
    # Megatron-LM.
    "--use-mup --mup-base-hidden-size 256 --mup-output-mult 10": (
        "--use-mup --mup-base-hidden-size 256 --mup-output-mult 10"
    ),
    "--scaling-recipe mup --scaling-base-hidden-size=256 --scaling-base-num-layers 4": (
        "--use-mup --mup-base-hidden-size 256"
    ),
    "--scaling-recipe depth_mup --scaling-base-num-layers 4 --scaling-base-head-dim 64": (
        "--use-mup --mup-independent-weight-decay --mup-base-head-dim 64 --mup-base-num-layers 4"
    ),
    "--scaling-recipe none --scaling-base-hidden-size 256": "",
    # What is not known stays, to be refused by name.
    "--mup apply --mup-attn-mult 2": "--mup apply --mup-attn-mult 2",
    "--mup --mup-input-mult $3": "--mup --mup-input-mult $3",
    "--scaling-recipe hyper": "--scaling-recipe hyper",
    "--mup-attn-mult 10": "--mup-attn-mult 10",
}


def read(flags: str, folder: Path) -> Diagnosis:
    (command,) = read_source(f"torchrun pretrain_gpt.py {SHAPE} {flags}".split(), {}, 8)
    return diagnose(command, doctor._complete, folder)


@pytest.mark.parametrize("line", WRITTEN)
def test_a_flag_with_another_form_is_written_in_the_form_of_this_program(line: str) -> None:
    assert with_counterparts(line.split()) == WRITTEN[line].split()


@pytest.mark.parametrize("line", TRANSFERRED)
def test_mup_of_another_program_is_written_in_the_flags_of_this_one(line: str) -> None:
    """Claim (command-line): the doctor translates muP of bigscience's fork and of Megatron-LM"""
    command = with_transfer(TrainingCommand("script", flags=f"{FORK} {line}".split()))
    assert command.flags == f"{FORK} {TRANSFERRED[line]}".split()
    assert command.lacking == []


def test_what_mup_of_another_program_does_otherwise_is_named(tmp_path: Path) -> None:
    """Claim (command-line): the doctor names what muP of another program does otherwise"""
    result = read("--mup --tensor-model-parallel-size 2 --embed-layernorm", tmp_path)
    named = "\n".join(result.differences)
    for words in ("residual connections", "epsilon", "2 tensor-parallel", "deepspeed", "around 0"):
        assert words in named
    assert "ffn-hidden-size" not in named
    assert result.config.model.use_mup
    assert result.config.model.mup_base_hidden_size == 128
    assert result.lacking == []
    result = read("--mup --ffn-hidden-size 128 --mup-output-mult 64", tmp_path)
    assert "--mup-base-ffn-hidden-size 256: the rate" in "\n".join(result.differences)
    (missing,) = result.lacking
    assert missing.startswith("--mup-output-mult 64: ")
    result = read("--scaling-recipe depth_mup --scaling-base-num-layers 2", tmp_path)
    assert [entry for entry in result.differences if "biases of linear layers" in entry]
    assert result.config.model.depth_mult == 2


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 8 --use-mcore-models --moe-grouped-gemm --expert-model-parallel-size 2",
        "--num-experts 8 --moe-router-topk 2",
        "--num-experts 8 --moe-aux-loss-coeff 0.1 --deepspeed",
        "--num-experts 8 --n-shared-experts 1 --moe-intermediate-size 64",
    ],
)
def test_defaults_of_microsofts_fork_are_no_difference_for_commands_of_core(
    flags: str, tmp_path: Path
) -> None:
    result = read(flags, tmp_path)
    assert not [entry for entry in result.differences if "is not given" in entry]


def test_defaults_of_microsofts_fork_are_differences_with_deepspeed(tmp_path: Path) -> None:
    found = "\n".join(read("--deepspeed --num-experts 8", tmp_path).differences)
    for flag in ("expert-interval", "moe-loss-coeff", "moe-train-capacity-factor"):
        assert f"--{flag} is not given" in found


def test_a_file_without_clipping_writes_no_clipping(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1}')
    result = read(f"--deepspeed --deepspeed_config {file} --clip-grad 2.0", tmp_path)
    assert result.config.optimizer.clip_grad == 0
    assert "--clip-grad 0.0" in result.command_text()


def test_ranks_of_mpi_need_no_flag() -> None:
    line = scan(["--use-mpi"], training_flags())
    assert (line.problems, codes(line.warnings)) == ([], ["ignored-flag"])


@pytest.mark.parametrize("name", ["MixtralTokenizer", "DeepSeekV3Tokenizer", "Llama4Tokenizer"])
def test_tokenizers_of_primus_are_those_of_hugging_face(name: str) -> None:
    (problem,) = scan(["--tokenizer-type", name], training_flags()).problems
    assert problem.code == "unsupported-value"
    assert "--tokenizer-type HFTokenizer" in str(problem)
