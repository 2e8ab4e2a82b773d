"""DeepSpeed files of users: each trains a step or is rejected with its reason.

Placeholders of templates are filled first.

Claim (deepspeed): DeepSpeed files from 2020 to today train, or are rejected with the reason
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedules
from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from tests.dist.engine_harness import batches_of, build
from tests.dist.rank_jobs import JobResults, Jobs, run_jobs
from tests.dist.reference import Samples
from tests.peer_ds_files import FILES, FOLDER, OWN, fill_placeholders
from tests.problems import codes

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 10 "
    "--tokenizer-type NullTokenizer --vocab-size 90 --allow-fp16-on-cpu --lr 1.5e-4 "
    "--adam-beta2 0.95"
)

LENGTH = "curriculum-exceeds-sequence"
UNSUPPORTED = "ds-key-unsupported"
ROOT = "microsoft__examples_deepspeed_"
REJECTED = {
    "bigscience__examples_curriculum_learning_ds_config_cl": LENGTH,
    "bigscience__tests_ds_config_cl": LENGTH,
    f"{ROOT}compression_ds_config_gpt_TEMPLATE_compression": UNSUPPORTED,
    f"{ROOT}data_efficiency_bert_pretrain_ds_config_bert_1clmetric_TEMPLATE": UNSUPPORTED,
    f"{ROOT}data_efficiency_bert_pretrain_ds_config_bert_2clmetrics_TEMPLATE": UNSUPPORTED,
    f"{ROOT}data_efficiency_gpt_pretrain_ds_config_gpt_1clmetric_TEMPLATE": UNSUPPORTED,
    f"{ROOT}data_efficiency_gpt_pretrain_ds_config_gpt_2clmetrics_TEMPLATE": UNSUPPORTED,
}
"""Files of other projects that are rejected, with the code of the problem. All others train."""


def micro_batch_flag(values: Any) -> str:
    """The micro-batch of a file that gives only the batch and the accumulation steps."""
    if "train_micro_batch_size_per_gpu" in values:
        return ""
    return (
        f"--micro-batch-size {values['train_batch_size'] // values['gradient_accumulation_steps']}"
    )


def configure(name: str, text: str, line: str, folder: Path) -> tuple[Config, list[str]]:
    """The configuration of one process, and the problems found."""
    for suffix in (".bin", ".idx"):
        (folder / f"tokens{suffix}").touch()
    path = folder / f"{name}.json"
    path.write_text(text, encoding="utf-8")
    argv = f"{FLAGS} {line} --data-path {folder / 'tokens'} --deepspeed_config {path}".split()
    return build_config(argv, world_size=1, warn=lambda _: None, complete=merge_file)


def loss_of_a_step(config: Config, meshes: dict[int, Mesh]) -> float:
    engine = build(config.with_vocab(90), meshes[1])
    samples = Samples(config.final_global_batch_size(1), {"seq_length": 16, "vocab_size": 90})
    batches = batches_of(config, meshes[1], samples)
    result = engine.train_step(batches, schedules.plan(config, TrainState(), 1))
    engine._engine.destroy()
    return float(result.loss)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Config, list[str]]]:
    """Configuration and problems of each file."""
    folder = tmp_path_factory.mktemp("files")
    files = {name: (json.dumps(file), line) for name, (file, line) in OWN.items()}
    for name in FILES:
        text = fill_placeholders((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        files[name] = text, micro_batch_flag(json.loads(text))
    return {name: configure(name, *file, folder) for name, file in files.items()}


@pytest.fixture(scope="module")
def trained(found: dict[str, tuple[Config, list[str]]]) -> JobResults:
    """The losses of those without a problem."""
    sound = ((name, config) for name, (config, problems) in found.items() if not problems)
    return run_jobs(1, Jobs((name, partial(loss_of_a_step, config)) for name, config in sound))


@pytest.mark.parametrize("name", [*OWN, *FILES])
def test_file_trains_or_is_rejected_with_its_reason(
    name: str, found: dict[str, tuple[Config, list[str]]], trained: JobResults
) -> None:
    _, problems = found[name]
    if name in REJECTED:
        assert REJECTED[name] in codes(problems)
        assert all(f"{name}.json" in problem for problem in problems), problems
    else:
        assert problems == []
        assert trained.of(name) == [pytest.approx(math.log(90), abs=0.5)]
