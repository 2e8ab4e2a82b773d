"""Training on conversations, packed with document masks, in every layout and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ds.preprocess import command as preprocess_data
from tests import chats
from tests.chats import assistant, user
from tests.e2e.runs import Launcher, Settings, checkpoint_differences, evaluations, losses, steps

LAYOUTS: dict[str, Settings] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_stage": 1},
    "pp2": {"pipeline_model_parallel_size": 2, "zero_stage": 1},
    "cp2": {"context_parallel_size": 2, "zero_stage": 2},
    "dp2": {"zero_stage": 3, "micro_batch_size": 1},
}
PROOFS = ("tp2", "dp2", "pp2")
COUNTS = (1, 4, 2, 9)
"""Words of the answers: micro-batches and ranks have different numbers of tokens with loss."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("chats")
    conversations = [
        {
            "messages": [
                message
                for turn in range(1 + index % 3)
                for message in (
                    user(f"Is {index} even?"),
                    assistant(" ".join(["yes", "no"][index % 2] for _ in range(COUNTS[turn]))),
                )
            ]
        }
        for index in range(40)
    ]
    lines = chats.write_lines(folder / "in.jsonl", conversations)
    tokenizer = chats.write_tokenizer(folder / "tokenizer", chats.CHATML)
    kind = ("--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(tokenizer))
    prefix = ("--output-prefix", str(folder / "out"))
    assert preprocess_data.main(["--input", str(lines), *prefix, "--chat", *kind]) == 0
    return {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 32,
        "position_embedding_type": "rope",
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": 4,
        "lr": 1e-2,
        "data_path": folder / "out_messages_document",
        "split": "80,20,0",
        "tokenizer_type": "HFTokenizer",
        "tokenizer_model": tokenizer,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "document_boundaries": "idx",
        "calculate_per_token_loss": True,
        "log_interval": 1,
        "eval_interval": 2,
        "eval_iters": 2,
        "num_workers": 0,
    }


@pytest.fixture(scope="module")
def alone(launcher: Launcher, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process, with checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    launcher.start({**settings, "save": folder, "save_interval": 2}).succeed()
    return folder


def evaluated(folder: Path) -> list[Any]:
    return [value for record in evaluations(folder) for value in record.values()]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.proof] * (n in PROOFS)) for n in LAYOUTS]
)
def test_layouts_equal_one_process(
    name: str, launcher: Launcher, settings: Settings, alone: Path, tmp_path: Path
) -> None:
    """Claim (samples): and training on them is the same in every layout"""
    launcher.start({**settings, **LAYOUTS[name], "save": tmp_path}, ranks=2).succeed()
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=2e-5)
    norms = ([step["grad_norm"] for step in steps(folder)] for folder in (tmp_path, alone))
    assert next(norms) == pytest.approx(next(norms), rel=2e-4)
    validation = ([one["validation_loss"] for one in evaluations(f)] for f in (tmp_path, alone))
    assert next(validation) == pytest.approx(next(validation), rel=2e-5)


def test_a_resumed_run_is_the_same_bit_for_bit(
    launcher: Launcher, settings: Settings, alone: Path, tmp_path: Path
) -> None:
    parts = {**settings, "save": tmp_path, "load": tmp_path, "save_interval": 2}
    launcher.start({**parts, "exit_interval": 2}).succeed()
    launcher.start(parts).succeed()
    assert steps(tmp_path) == steps(alone)
    assert evaluations(tmp_path) == evaluations(alone)
    name = "global_step4"
    assert checkpoint_differences(alone / name, tmp_path / name) == []


def test_a_text_of_the_same_tokens_has_another_loss(
    launcher: Launcher, settings: Settings, alone: Path, tmp_path: Path
) -> None:
    """Else the comparisons above would not see the loss mask."""
    from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
    from tests.token_files import write_pair

    file = IndexedDataset(settings["data_path"])
    text = write_pair(tmp_path / "text", [file.get(at) for at in range(len(file))])
    folder = tmp_path / "run"
    changed = {"data_path": text, "train_iters": 1, "eval_iters": 0, "save": folder}
    launcher.start({**settings, **changed}).succeed()
    assert losses(folder)[0] != pytest.approx(losses(alone)[0], rel=1e-4)
