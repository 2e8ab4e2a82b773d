"""Runs with the files of other trainers go on, and their steps are checked.

The files are those of a run here, in the names and forms of the trainers; `tests/interop` has runs
of the trainers' own packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_ds.config import Config, DataConfig
from megatron_ds.config.problems import ignore
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.validation import DataFiles
from megatron_ds.training.replay import given_samples
from megatron_ds.training.replay.check_step import check_step, open_pair
from megatron_ds.training.replay.one_process import Trust
from tests.e2e.runs import Launcher, Settings, steps
from tests.problems import raises_problem
from tests.unit.conversion.trainer_runs import State, write_olmo_core, write_torchtitan

SAVED = 3
END = 6
LLAMA = {
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
STEPS = {
    "global_batch_size": 4,
    "train_iters": 12,
    "exit_interval": END,
    "eval_iters": 0,
    "lr_decay_style": "constant",
    "clip_grad": 0.5,
    "attention_dropout": 0,
    "hidden_dropout": 0,
}
ADAM = {"lr": 1e-2, "adam_beta2": 0.95, "weight_decay": 0.1}
GROUPS = {
    "torchtitan": ("pattern=*,wd=0.1",),
    "olmo_core": ("pattern=embedding.word.weight,wd=0", "pattern=*norm.weight,wd=0.1"),
}
"""Weight decay of norms and embeddings in the trainers' files."""
OF_MODEL = {"num_attention_heads": 4, "rotary_base": 10000, "seq_length": 32}
LAYOUTS: dict[str, tuple[Settings, int]] = {
    "torchtitan": ({"tensor_model_parallel_size": 2}, 2),
    "olmo_core": ({"zero_stage": 3}, 2),
}


def native(launcher: Launcher, base: Settings, trainer: str, folder: Path) -> Path:
    """The folder of a run with the trainer's weight decay."""
    settings = {**base, **LLAMA, **STEPS, **ADAM, **OF_MODEL}
    settings |= {"param_group": GROUPS[trainer], "save": folder, "save_interval": 1}
    launcher.start(settings).succeed()
    return folder


def opened(folder: Path, step: int) -> SourceCheckpoint:
    options = ReadOptions(optimizer=True)
    return open_source(folder / f"global_step{step}", options=options)


def of_run(base: Settings, trainer: str) -> dict[str, Any]:
    """The flags of a run that goes on."""
    kept = ("micro_batch_size", "data_path", "split", "tokenizer_type", "vocab_size", "num_workers")
    settings = {name: base[name] for name in kept} | STEPS
    return settings | (OF_MODEL if trainer == "torchtitan" else {})


def samples_of(base: Settings, first: int, end: int) -> Any:
    """Ids of the samples that a run reads, [samples, length + 1]."""
    data = build_datasets(
        DataFiles(DataConfig(data_path=(str(base["data_path"]),), split=base["split"])),
        num_samples=(STEPS["train_iters"] * 4, 0, 0),
        seq_length=32,
        seed=1234,
        tokenizer_fingerprint="samples",
        vocab_size=128,
    ).train
    assert data is not None
    return numpy.stack([data[index] for index in range(first, end)])


@pytest.mark.parametrize("trainer", sorted(GROUPS))
def test_a_run_goes_on_as_the_one_that_saved_it(
    trainer: str, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (checkpoints): a run goes on, on several ranks, from its own checkpoint in the form of
    torchtitan's or OLMo-core's files as from its own"""
    run = native(launcher, base, trainer, tmp_path / "run")
    source = opened(run, SAVED)
    if trainer == "torchtitan":
        write_torchtitan(source, tmp_path / "theirs", step=SAVED, tokens=4 * SAVED * 32)
    else:
        write_olmo_core(source, tmp_path / "theirs", step=SAVED)
    source.release()
    layout, ranks = LAYOUTS[trainer]
    settings = {**of_run(base, trainer), **layout, "save": tmp_path / "ours"}
    settings["load"] = f"{trainer}:{tmp_path / 'theirs'}"

    output = launcher.start(settings, ranks=ranks).succeed()

    assert "steps-taken-over" in output
    ours = steps(tmp_path / "ours")
    expected = steps(run)[SAVED:]
    for name in ("iteration", "lm_loss", "grad_norm", "learning_rate", "weight_decay"):
        values = [step[name] for step in expected]
        assert [step[name] for step in ours] == pytest.approx(values, abs=2e-6), name


def test_a_step_of_another_trainer_is_computed_again(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (logging): a step between two checkpoints of torchtitan is equal to its computation,
    on the data of the flags or on given samples, or its mistake is named"""
    run = native(launcher, base, "torchtitan", tmp_path / "run")
    before, after = (opened(run, step) for step in (SAVED, SAVED + 1))
    stale = before.optimizer["exp_avg"]["layers.1.mlp.fc_out.weight"].read().clone()

    def leave_moment(state: State) -> None:
        state["optimizer"]["state.layers.1.feed_forward.w2.weight.exp_avg"] = stale

    for name, change in (("right", ignore), ("wrong", leave_moment)):
        for step, source in ((SAVED, before), (SAVED + 1, after)):
            changes = {"change": change} if step > SAVED else {}
            write_torchtitan(source, tmp_path / name, step=step, tokens=4 * step * 32, **changes)
    before.release()
    after.release()
    lines: list[str] = []

    def replay(flags: Sequence[str]) -> int:
        launcher.start(flags).succeed()
        return 0

    def on_samples(words: Sequence[str]) -> int:
        launcher.start(words, script=Path(given_samples.__file__)).succeed()
        return 0

    flags = of_run(base, "torchtitan") | {"data_path": (str(base["data_path"]),)}
    del flags["exit_interval"]
    trust = Trust(flags, files=True)
    config = Config(given=frozenset(flags)).with_values(flags)
    found = []
    for name in ("right", "wrong"):
        steps_of = (f"torchtitan:{tmp_path / name}/step-{SAVED + ahead}" for ahead in (0, 1))
        with open_pair(*steps_of, config, trust, ignore) as pair:
            found.append(check_step(pair, replay, lines.append, trust=trust, tolerance=None))
    assert found == [0, 1], lines
    samples = tmp_path / "samples.npy"
    numpy.save(samples, samples_of(base, SAVED * 4, (SAVED + 1) * 4))
    given = {name: value for name, value in flags.items() if name not in ("data_path", "split")}
    trust = Trust(given, files=True)
    config = Config(given=frozenset(given)).with_values(given)
    steps_of = (f"torchtitan:{tmp_path / 'right'}/step-{SAVED + ahead}" for ahead in (0, 1))
    with open_pair(*steps_of, config, trust, ignore, samples) as pair:
        assert check_step(pair, on_samples, lines.append, trust=trust, tolerance=None) == 0, lines
    numpy.save(samples, numpy.zeros((3, 33), numpy.int32))
    steps_of = (f"torchtitan:{tmp_path / 'right'}/step-{SAVED + ahead}" for ahead in (0, 1))
    with (
        raises_problem("samples-of-other-steps"),
        open_pair(*steps_of, config, trust, ignore, samples),
    ):
        pass
    named = lines.index("not equal: layers.1.mlp.fc_out.weight")
    assert lines[named + 1].startswith("    moments ("), lines
