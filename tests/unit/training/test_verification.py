"""The plan of a replay, its settings, and the comparison of records."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.config.fields import with_tuples
from megatron_ds.config.problems import UserError
from megatron_ds.training.loggers.jsonl_logger import to_line
from megatron_ds.training.replay.one_process import Trust
from megatron_ds.training.replay.record_comparison import DECAY, MISSING, compare, continued
from megatron_ds.training.replay.recorded_run import check_record
from megatron_ds.training.replay.verification import Segment, plan, replay_config, verify
from tests.problems import raises_problem

RECORD: dict[str, Any] = {
    "iteration": 3,
    "loss": 4.0,
    "grad_norm": 2.0,
    "skipped": False,
    "samples": {"8": "aa", "9": "bb"},
    "random": {"embedding": "cc", "embedding end": "dd"},
    "layers": {"embedding": 3.0, "layers.0": 4.0},
    "weights": {"layers.0.w": [1.0, 0.5], "head.w": [2.0, 0.0]},
    "gradients": {"layers.0.w": [1.0, 0.5], "head.w": [1.7, 0.0]},
    "updated": {"layers.0.w": [1.1, 0.5], "head.w": [2.1, 0.0]},
    "update": {"layers.0.w": 0.2, "head.w": 0.3},
}
TRUSTED = Trust(files=True)


def differing(*keys: str, by: float = 0.1, last: int | None = None) -> list[tuple[str, str, float]]:
    """The differences from a record in which the values below some keys are others."""
    run = copy.deepcopy(RECORD)
    for key in keys:
        *path, name = key.split("/")
        values = run
        for part in path:
            values = values[part]
        value = values[name]
        values[name] = [x + by for x in value] if isinstance(value, list) else value + by
    return [(x.cause, x.where, round(x.size, 6)) for x in compare(run, RECORD) if x.size]


def test_differences_come_in_the_order_of_a_step() -> None:
    keys = ("updated/head.w", "gradients/layers.0.w", "gradients/head.w", "layers/layers.0")
    assert [item[:2] for item in differing(*keys, "loss", "weights/layers.0.w")] == [
        ("weights", "layers.0.w: norm"),
        ("weights", "layers.0.w: sum"),
        ("forward", "layers.0: output"),
        ("forward", "head: loss"),
        ("gradient", "head.w: norm"),
        ("gradient", "head.w: sum"),
        ("gradient", "layers.0.w: norm"),
        ("gradient", "layers.0.w: sum"),
        ("update", "layers.0.w: direction"),
        ("update", "head.w: direction"),
        ("optimizer", "head.w: norm"),
        ("optimizer", "head.w: sum"),
    ]


def test_differences_are_relative_to_norms() -> None:
    assert differing("weights/head.w")[:2] == [
        ("weights", "head.w: norm", 0.05),
        ("weights", "head.w: sum", 0.05),
    ]
    assert differing("grad_norm") == [("gradient", "all parameters: norm", 0.05)]
    assert differing("update/head.w")[0] == ("update", "head.w: norm", round(0.1 / 0.3, 6))


def test_weight_decay_shows_in_the_direction_of_the_update() -> None:
    """A decay of 0.002 of an update that is orthogonal to the weights changes its norm by 2e-6."""
    weights = 1.0
    update = 0.01
    decay = 0.002
    run = copy.deepcopy(RECORD)
    replay = copy.deepcopy(RECORD)
    for record, shrinks in ((run, decay), (replay, 0.0)):
        along = weights - update * shrinks
        record["weights"]["head.w"][0] = weights
        record["updated"]["head.w"][0] = math.hypot(along, update)
        record["update"]["head.w"] = math.hypot(update * shrinks, update)
    sizes = {item.where: item.size for item in compare(run, replay) if item.cause == "update"}
    assert sizes["head.w: norm"] < 3e-6
    assert sizes["head.w: direction"] == pytest.approx(2 * decay, rel=0.01)


def half_precision_records(
    decay: float, rounding: float, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Records of a step and its replay, in which rounding turns each update by itself.

    Args:
        decay: Weight decay of the run; its replay has 0.1.
        rounding: Norm of what rounding adds to an update, relative to it.
        seed: Of what rounding adds.
    """
    draw = random.Random(seed)
    rate = 3e-4
    run = copy.deepcopy(RECORD)
    replay = copy.deepcopy(RECORD)
    for record, wd in ((run, decay), (replay, 0.1)):
        for key in ("weights", "updated", "update", "gradients"):
            record[key] = {}
        for layer in range(6):
            for name, elements, std in (("fc_in", 65536, 0.02), ("fc_out", 65536, 0.006)):
                weights = std * elements**0.5
                update = rate * elements**0.5
                along = rounding * update * draw.gauss(0, 1) / elements**0.5 - rate * wd * weights
                record["weights"][f"{layer}.{name}.weight"] = [weights, 0.0]
                record["updated"][f"{layer}.{name}.weight"] = [
                    math.hypot(weights + along, update),
                    0.0,
                ]
                record["update"][f"{layer}.{name}.weight"] = math.hypot(update, along)
    return run, replay


def test_another_decay_of_all_weights_shows_beyond_rounding() -> None:
    """Claim (logging): a replay names a weight decay of 0 for one of 0.1 in half precision, where
    it is within the rounding of each single weight, and rounding alone is no such difference"""

    def sizes(decay: float, rounding: float, seed: int) -> tuple[float, float]:
        records = half_precision_records(decay, rounding, seed)
        found = {item.where: item.size for item in compare(*records)}
        single = max(size for name, size in found.items() if name.endswith("direction"))
        return found[DECAY], single

    for seed in range(100):
        decayed = sizes(0.0, 0.05, seed)
        rounded = sizes(0.1, 1.0, seed)
        assert rounded[0] < 1e-3 < decayed[0]
        assert decayed[1] < rounded[1]
    assert sizes(0.1, 0.0, 0) == (0.0, 0.0)
    assert sizes(0.0, 0.0, 0)[0] == pytest.approx(2.6e-3, rel=0.1)


def test_compiled_layers_have_no_values() -> None:
    run = copy.deepcopy(RECORD)
    run["layers"] = {}
    del run["random"]["embedding end"]
    assert [item for item in compare(run, RECORD, is_compiled=True) if item.size] == []
    names = [item.where for item in compare(run, RECORD) if item.size]
    assert names == ["embedding end", "embedding: output", "layers.0: output"]
    del run["random"]["embedding"]
    assert [x.where for x in compare(run, RECORD, is_compiled=True) if x.size] == ["embedding"]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "path",
    [
        "loss",
        "grad_norm",
        "skipped",
        "samples/9",
        "random/embedding",
        "weights/head.w",
        "gradients/head.w",
        "updated/head.w",
        "update/head.w",
    ],
)
def test_a_value_that_is_missing_or_null_differs(path: str, is_compiled: bool) -> None:
    *keys, name = path.split("/")
    for replacement in (None, MISSING):
        run = copy.deepcopy(RECORD)
        values = run[keys[0]] if keys else run
        values[name] = [None, None] if isinstance(values[name], list) else None
        if replacement is MISSING and keys:
            del values[name]
        sizes = [item.size for item in compare(run, RECORD, is_compiled=is_compiled)]
        assert max(sizes) == math.inf


def test_weights_after_a_step_are_those_before_the_next() -> None:
    after = copy.deepcopy(RECORD) | {"iteration": 4, "weights": RECORD["updated"]}
    assert [item for item in continued(RECORD, after) if item.size] == []
    after["weights"] = copy.deepcopy(RECORD["weights"])  # the update is lost
    assert [item.where for item in continued(RECORD, after) if item.size] == [
        "layers.0.w: norm",
        "head.w: norm",
    ]
    assert list(continued(RECORD, {"skipped": True})) == []


def folder_of(path: Path, starts: list[tuple[int, Config]], *, saved: tuple[int, ...]) -> Path:
    """A --save folder with records of the steps 2, 4 and 6."""
    events = [
        {"event": "start", "iteration": first, "ranks": 4, "config": config.to_dict()}
        for first, config in starts
    ]
    (path / "events.jsonl").write_text("".join(map(to_line, events)))
    lines = [json.dumps({**RECORD, "iteration": step}) + "\n" for step in (2, 4, 6)]
    (path / "step_records.jsonl").write_text("".join(lines) + '{"iteration": 8, "lo')
    for iteration in saved:
        (path / f"global_step{iteration}").mkdir()
    return path


def run_of(**values: Any) -> Config:
    without = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "record_every": 2}
    return Config().with_values({"micro_batch_size": 2, "vocab_size": 101, **without, **values})


def test_steps_are_replayed_from_the_checkpoint_before_them(tmp_path: Path) -> None:
    starts = [(0, run_of()), (3, run_of(load=str(tmp_path), tensor_model_parallel_size=2))]
    folder = folder_of(tmp_path, starts, saved=(1, 3, 4, 6))
    _, segments = plan(folder, None, TRUSTED)
    assert [(one.checkpoint, one.steps) for one in segments] == [(1, [2]), (3, [4]), (4, [6])]
    assert [(x.checkpoint, x.steps) for x in plan(folder, ["3-5", "2"], TRUSTED)[1]] == [
        (1, [2]),
        (3, [4]),
    ]
    config = replay_config(folder, segments[1], tmp_path / "replay", Trust({"num_workers": 3}))
    assert set(config.axis_sizes.values()) == {1}
    assert (config.checkpoint.load, config.checkpoint.ckpt_step) == (str(folder), 3)
    assert config.schedule.global_batch_size == 4  # of 2 data-parallel ranks
    assert config.model.make_vocab_size_divisible_by == 128
    assert (config.stopping.exit_interval, config.data.num_workers) == (4, 3)
    assert config.checkpoint.save is None


@pytest.mark.parametrize(
    ("values", "steps", "code"),
    [
        ({}, ["3"], "step-not-recorded"),
        ({}, ["4-2"], "steps-malformed"),
        ({"tensor_model_parallel_size": 2, "attention_dropout": 0.1}, ["2"], "masks"),
        ({"ds_sequence_parallel_size": 2, "hidden_dropout": 0.1}, ["2"], "masks"),
        (
            {"num_experts": (4,), "moe_router_load_balancing_type": "global_aux_loss"}
            | {"moe_aux_loss_coeff": 0.5},
            ["2"],
            "replay-balances-other-loads",
        ),
    ],
)
def test_steps_that_cannot_be_replayed(
    tmp_path: Path, values: dict[str, Any], steps: list[str], code: str
) -> None:
    folder = folder_of(tmp_path, [(0, run_of(**values))], saved=())
    with raises_problem("replay-draws-other-masks" if code == "masks" else code):
        plan(folder, steps, TRUSTED)


def test_missing_files(tmp_path: Path) -> None:
    with raises_problem("step-records-missing"):
        plan(tmp_path, None, TRUSTED)
    folder = folder_of(tmp_path, [(5, run_of(load=str(tmp_path)))], saved=(2,))
    with raises_problem("replay-without-checkpoint"):
        plan(folder, ["6"], TRUSTED)
    with raises_problem("step-without-start"):
        plan(folder, ["2"], TRUSTED)
    (folder / "step_records.jsonl").write_text('{"iteration": 1')  # no step is no verdict
    with raises_problem("step-records-missing"):
        plan(folder, None, TRUSTED)


def line_of(**values: Any) -> str:
    return json.dumps({**RECORD, "iteration": 2, **values})


DAMAGED = {
    "a list": "[]",
    "cut": "{",
    "nan": line_of(loss=math.nan),
    "nan in a norm": line_of(updated={"w": [math.nan, 0.0]}),
    "infinity": line_of(grad_norm=math.inf),
    "beyond a float": line_of().replace("4.0", "1e999"),
    "iteration beyond a float": line_of().replace('"iteration": 2', '"iteration": 1e999'),
    "digits": line_of().replace('"iteration": 2', '"iteration": ' + "9" * 5000),
    "a text for a number": line_of(loss="4.0"),
    "true for a number": line_of(loss=True),
    "three numbers": line_of(weights={"w": [1.0, 2.0, 3.0]}),
    "a list for an object": line_of(layers=[1.0]),
    "a number for a hash": line_of(samples={"8": 3}),
    "deep": line_of(layers={}).replace("{}", "[" * 100_000 + "]" * 100_000),
    "bytes": "\udcff",
} | {
    f"without {name}": json.dumps({k: v for k, v in RECORD.items() if k != name}) for name in RECORD
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    folder = folder_of(tmp_path, [(0, run_of())], saved=())
    good = (folder / "step_records.jsonl").read_bytes().splitlines(keepends=True)[0]
    text = good + line.encode(errors="surrogateescape") + b"\n"
    (folder / "step_records.jsonl").write_bytes(text)
    with raises_problem("step-records-damaged", contains="line 2"):
        plan(folder, None, TRUSTED)


@pytest.mark.parametrize(
    "event",
    [
        {"event": "start", "iteration": 0, "ranks": 1},
        {"event": "start", "iteration": 0, "config": {}},
        {"event": "start", "iteration": -1, "ranks": 1, "config": {}},
        {"event": "start", "iteration": 0, "ranks": 0, "config": {}},
        {"event": "start", "iteration": 0, "ranks": 1, "config": []},
        {"event": "start", "iteration": 0, "ranks": 1, "config": {"schedule": {"stages": ["{"]}}},
        {"event": "start", "iteration": 0, "ranks": 1, "config": {"model": {"vocab_size": "x"}}},
        {"iteration": 0},
    ],
)
def test_a_damaged_start_is_named(tmp_path: Path, event: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, [(0, run_of())], saved=())
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    with raises_problem("step-records-damaged", contains="events.jsonl"):
        verify(folder, None, lambda words: 1, print, trust=TRUSTED)


def test_a_record_of_a_skipped_step_has_no_weights() -> None:
    names = ("weights", "gradients", "updated", "update")
    record = {name: value for name, value in RECORD.items() if name not in names}
    check_record({**record, "skipped": True, "loss": None, "grad_norm": None})
    with pytest.raises(KeyError):
        check_record(record)


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ({"data_path": ("0.3", "OUTSIDE/web")}, ["recorded-files-not-trusted"]),
        ({"data_path": ("0.3", "RUN/web")}, []),
        ({"data_path": ("s3://bucket/web",)}, ["recorded-files-not-trusted"]),
        ({"data_path": ("RUN/../web",)}, ["recorded-files-not-trusted"]),
        ({"data_args_path": "RUN/list.txt"}, ["recorded-files-not-trusted"]),
        ({"load": "hf:OUTSIDE"}, ["recorded-files-not-trusted"]),
        (
            {"tokenizer_type": "HFTokenizer", "tokenizer_model": "org/name"},
            ["recorded-files-not-trusted"],
        ),
        (
            {"stages": ('{"name": "a", "data_path": ["OUTSIDE/web"]}',)},
            ["recorded-files-not-trusted"],
        ),
        ({"trust_remote_code": True}, ["checkpoint-tokenizer-runs-code"]),
    ],
)
def test_a_record_names_what_its_reader_allows(
    tmp_path: Path, values: dict[str, Any], codes: list[str]
) -> None:
    """Claim (logging): nothing in the record of a run decides which code its reader runs, what it
    writes, or which files it reads outside of the run's folder"""
    run = tmp_path / "run"
    run.mkdir()
    text = json.dumps(values).replace("RUN", str(run)).replace("OUTSIDE", str(tmp_path / "other"))
    config = run_of(tokenizer_type="NullTokenizer").with_values(with_tuples(json.loads(text)))
    segment = Segment(0, config, 0, 1, [2])

    def problems(trust: Trust) -> list[str]:
        try:
            restricted_config = replay_config(run, segment, tmp_path / "replay", trust)
        except UserError as error:
            return [problem.code for problem in error.problems]
        written = restricted_config.data.data_cache_path
        assert trust.files or written == str(tmp_path / "replay" / "data_cache_path")
        return []

    assert problems(Trust()) == codes
    trusted = [code for code in codes if code != "recorded-files-not-trusted"]
    assert problems(TRUSTED) == trusted
    given = Trust(
        {"data_path": ("x",), "trust_remote_code": True, "load": None, "data_args_path": None}
    )
    assert problems(given) == [
        code for code in codes if "tokenizer_model" in values or "stages" in values
    ]


def test_a_replay_injects_no_errors(tmp_path: Path) -> None:
    """Settings that decide the layout, what is observed or files are left out of a replay."""
    config = run_of(
        rerun_mode="validate_results",
        error_injection_rate=3,
        tensorboard_dir="x",
        tensor_model_parallel_size=2,
        data_cache_path="cache",
        fim_data=True,
        fim_pad_token="<pad>",
        max_consecutive_skipped_steps=2,
    )
    segment = Segment(0, config, 0, 2, [2])
    replay = replay_config(tmp_path, segment, tmp_path, TRUSTED)
    assert (replay.rerun, replay.logging.tensorboard_dir) == (Config().rerun, None)
    assert replay.parallel == Config().parallel
    assert (replay.data.fim_pad_token, replay.data.data_cache_path) == ("<pad>", "cache")
    assert replay.precision.max_consecutive_skipped_steps == 0, "the run went on"


@pytest.mark.parametrize(("stage", "masters", "replayed"), [(0, 0, 0), (3, 0, 1), (3, 1, 2)])
def test_a_replay_has_the_lowest_stage_that_has_the_masters(
    stage: int, masters: int, replayed: int, tmp_path: Path
) -> None:
    in_bf16 = {"bf16": True, "bf16_master_weights": True, "bf16_stochastic_round": True}
    config = run_of(zero_stage=stage, **(in_bf16 if masters else {}))
    replay = replay_config(tmp_path, Segment(0, config, 0, 2, [2]), tmp_path, TRUSTED)
    assert replay.zero_stage == replayed
    assert replay.optimizer.bf16_stochastic_round == bool(masters)


def test_a_replay_that_fails(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [(0, run_of())], saved=())
    with raises_problem("replay-failed"):
        verify(folder, ["2"], lambda words: 3, print, trust=TRUSTED)
