"""Runs of pretrain_gpt.py in many layouts, compared with a reference that shares no code with them.

The reference (tests/independent) writes token files and initial weights, reads its own files in
Megatron's order, and computes losses, gradient norms, learning rates and batch sizes of every step
in fp64. One training of a model is the reference of all its layouts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.runs import REPOSITORY, Launcher, Settings, evaluations, steps
from tests.independent import recorded_dropout
from tests.independent.model import Weights, initial_weights, write_weights
from tests.independent.token_order import Tokens, read_documents, samples_in_order, write_documents
from tests.independent.training import Step, train
from tests.proofs.cases import with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)

LOSS_ERROR = 3e-6
"""Absolute; the largest difference seen is 1.7e-6 (four units of the last place)."""
NORM_ERROR = 1e-5
"""Relative; the largest difference seen is 2.3e-6."""
LAST_DIGITS = 1
"""Largest difference of a printed loss, in units of its seventh digit, where fp32 is rounded."""
SMALLEST_GAP = 5e-5
"""Of scores that decide a routing: rounding to fp32 must not change it."""
EOD = 59
LENGTH = 12
SEED = 1234

COMMON = {
    "hidden_size": 24,
    "ffn_hidden_size": 48,
    "num_attention_heads": 6,
    "seq_length": LENGTH,
    "vocab_size": EOD + 1,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 4,
    "lr": 3e-3,
    "weight_decay": 0.1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
MODELS: dict[str, dict[str, Any]] = TABLES["models"]


def parallel(tp: int = 1, pp: int = 1, ulysses: int = 1, ep: int = 1, **others: Any) -> Settings:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "ds_sequence_parallel_size": ulysses,
        "expert_model_parallel_size": ep,
        "zero_stage": 1,
        **others,
    }


SOME, MORE = (
    {
        name: (model, world, parallel(**sizes))
        for name, (model, world, sizes) in TABLES[table].items()
    }
    for table in ("some", "more")
)
RATES = {"activation": 0.2, "attention": 0.1}
DROPOUT: dict[str, tuple[int, int, int, Settings]] = TABLES["dropout"]
"""Tensor-, pipeline- and data-parallel sizes, and further settings."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of few documents, which end with their end-of-document token."""
    draw = np.random.default_rng(5)
    documents = [
        np.append(draw.integers(0, EOD, draw.integers(1, 30)), EOD).astype(np.int64)
        for _ in range(28)
    ]
    return write_documents(tmp_path_factory.mktemp("independent") / "tokens", documents)


def options_of(model: str) -> dict[str, Any]:
    options = {**COMMON, **MODELS[model]}
    return {name: value for name, value in options.items() if value is not None}


@functools.cache
def weights_of(model: str) -> Weights:
    return initial_weights(options_of(model), seed=12)


def samples_of(model: str, prefix: Path) -> tuple[Tokens, bool]:
    options = options_of(model)
    documents = read_documents(prefix)
    wanted = options.get("train_samples") or options["train_iters"] * options["global_batch_size"]
    documents = documents[:21] if "eval_iters" in options else documents  # three quarters
    return samples_in_order(documents, wanted, LENGTH, SEED)


@functools.cache
def reference_of(model: str, prefix: Path) -> list[Step]:
    options = options_of(model)
    validation = None
    if "eval_iters" in options:
        wanted = options["eval_iters"] * options["global_batch_size"]
        validation, _ = samples_in_order(read_documents(prefix)[21:], wanted, LENGTH, SEED)
    return train(options, weights_of(model), samples_of(model, prefix)[0], validation)


def flags_of(options: Mapping[str, Any], prefix: Path, weights: Path, folder: Path) -> Settings:
    return {
        "split": "100,0,0",
        "eval_iters": 0,
        **options,
        "vocab_size": EOD,  # NullTokenizer adds the end of a document
        "tokenizer_type": "NullTokenizer",
        "data_path": prefix,
        "load": weights,
        "metrics_jsonl": folder / "metrics.jsonl",
        "make_vocab_size_divisible_by": 4,
        "num_workers": 0,
        "log_interval": 1,
    }


@pytest.mark.parametrize("name", with_proofs([*SOME, *MORE], MORE))
def test_layout_equals_the_reference(
    name: str, prefix: Path, launcher: Launcher, tmp_path: Path
) -> None:
    """Claim (parallel): runs of the command line on 1 to 8 ranks, with sizes of 2 and 3, have the
    losses, validation losses, gradient norms, learning rates and batch sizes of a reference in fp64
    that shares no code with the package: tied embeddings, packed documents, per-token loss, experts
    with capacity, latent attention, multi-token prediction, ramp-up

    Claim (parallel): the losses of a run with packed samples and `--eod-mask-loss` equal the losses
    of its documents one by one
    """
    model, ranks, layout = (SOME | MORE)[name]
    weights = write_weights(tmp_path / "weights", options_of(model), weights_of(model))
    flags = flags_of(options_of(model), prefix, weights, tmp_path)
    output = launcher.start({**flags, **layout}, ranks=ranks).succeed()
    expected = reference_of(model, prefix)
    check(steps(tmp_path), expected)
    check_printed(output, steps(tmp_path), expected)
    evaluated = {each["iteration"]: each["validation_loss"] for each in evaluations(tmp_path)}
    losses = {number: step.validation_loss for number, step in enumerate(expected, 1)}
    losses = {number: loss for number, loss in losses.items() if loss is not None}
    assert evaluated == pytest.approx(losses, abs=LOSS_ERROR)


def test_the_reference_imports_nothing_of_the_package() -> None:
    tests = REPOSITORY / "tests"
    for path in (tests / "dense_gpt.py", *(tests / "independent").glob("*.py")):
        assert "megatron_ds" not in path.read_text(), path


def test_references_show_what_they_should(prefix: Path) -> None:
    """Both kinds of a last epoch, clipped and other norms, all batch sizes, dropped tokens."""
    steps_of = {model: reference_of(model, prefix) for model in MODELS}
    assert {samples_of(model, prefix)[1] for model in MODELS} == {False, True}
    assert {step.grad_norm > 1.0 for step in steps_of["tied"]} == {False, True}
    assert {step.global_batch_size for step in steps_of["ramp-up"]} == {4, 8, 12}
    assert {step.learning_rate < 2e-3 for step in steps_of["ramp-up"][:3]} == {False, True}
    for model in ("experts", "first tokens"):
        assert min(step.gap for step in steps_of[model]) > SMALLEST_GAP, model
        assert min(step.token_drop_rate for step in steps_of[model]) > 0, model


@pytest.mark.parametrize(
    "name",
    [
        "TP 2 x DP 2, ZeRO 3",
        pytest.param("PP 2 x DP 2", marks=pytest.mark.proof),
        pytest.param("DP 2, recomputed", marks=pytest.mark.proof),
        pytest.param("TP 2 x PP 2", marks=pytest.mark.proof),
    ],
)
def test_dropout_equals_the_reference_with_the_same_masks(
    name: str, prefix: Path, launcher: Launcher, tmp_path: Path
) -> None:
    """Claim (parallel): with dropout, too, given the recorded masks, none of which is missing"""
    tp, pp, dp, settings = DROPOUT[name]
    options = options_of("tied") | {"num_layers": 2, "global_batch_size": 8, "train_iters": 4}
    initial = initial_weights(options, seed=1)
    flags = flags_of(options, prefix, write_weights(tmp_path / "w", options, initial), tmp_path)
    flags |= {"hidden_dropout": RATES["activation"], "attention_dropout": RATES["attention"]}
    launcher.start(
        {**flags, **parallel(tp=tp, pp=pp), **settings},
        ranks=tp * pp * dp,
        script=Path(recorded_dropout.__file__),
        environment={recorded_dropout.VARIABLE: str(tmp_path)},
    ).succeed()

    replay = recorded_dropout.Replay(tmp_path, 2, RATES, tp=tp, pp=pp, dp=dp)
    samples, _ = samples_in_order(read_documents(prefix), 32, LENGTH, SEED)
    check(steps(tmp_path), train(options, initial, samples, dropouts=replay.dropouts))
    assert replay.problems() == []


def check_printed(output: str, records: list[dict[str, Any]], expected: list[Step]) -> None:
    """The losses and norms of the log are those of the records, and right to the last digits."""
    lines = re.findall(r"lm loss: (\S+) .*grad norm: (\S+) ", output)
    assert lines == [(f"{each['lm_loss']:.6E}", f"{each['grad_norm']:.3f}") for each in records]
    for (loss, _), step in zip(lines, expected, strict=True):
        wrong = Decimal(loss) - Decimal(f"{step.lm_loss:.6E}")
        assert abs(wrong) <= LAST_DIGITS * Decimal("1e-6"), (loss, step.lm_loss)


def check(records: list[dict[str, Any]], expected: list[Step]) -> None:
    for name, error in {"lm_loss": {"abs": LOSS_ERROR}, "grad_norm": {"rel": NORM_ERROR}}.items():
        values = [record[name] for record in records]
        assert values == pytest.approx([getattr(step, name) for step in expected], **error), name
    for name in ("learning_rate", "global_batch_size", "token_drop_rate"):
        values = [record.get(name, 0) for record in records]
        assert values == pytest.approx([getattr(step, name) for step in expected], rel=1e-6), name
