"""Any JSON at any key of a --deepspeed_config file: an error that names file or flag, or a run.

The file is migrated as well, or rejected with an error.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds import schedule_validation
from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.engine.ds_config import keys as ds_keys
from megatron_ds.engine.ds_config import migrate
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.merge import merge_file
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, JSON
from tests.problems import codes
from tests.proofs.cases import with_proofs

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 10 "
    "--micro-batch-size 2 --data-path p --tokenizer-type NullTokenizer --vocab-size 99"
)
BLOCK_KEYS = {f"{block}.{key}" for block, keys in ds_keys.BLOCKS.items() for key in keys}
OTHER_KEYS = {*ds_keys.REFUSED, *ds_keys.RENAMED, *ds_keys.OLD_SWITCHES, *ds_keys.IGNORED_KEYS}
KEYS = sorted({*ds_keys.TOP_KEYS, *BLOCK_KEYS, *OTHER_KEYS})
GOOD: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 0.95], "eps": 1e-08}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_type": "linear", "total_num_steps": 10, "warmup_num_steps": 3},
    },
    "activation_checkpointing": {"number_checkpoints": 4},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ds") / "ds.json"


@pytest.fixture(scope="module")
def config(path: Path) -> Config:
    argv = f"{FLAGS} --deepspeed_config {path}".split()
    return arguments.build_config(argv, world_size=2, warn=lambda line: None)[0]


def check(config: Config, content: bytes) -> list[str]:
    """The problems; each says where it is. Without one, the file leads to a DeepSpeed JSON."""
    path = str(config.deepspeed.deepspeed_config)
    Path(path).write_bytes(content)
    with suppress(UserError):
        migrate.text(migrate.migrate(path), path)
    filled, problems = merge_file(config, 2)
    problems = [*problems, *filled.problems(2), *schedule_validation.problems(filled, 2)]
    for problem in problems:
        assert path in str(problem) or "--" in str(problem), problem
    if not problems:
        json.dumps(build_ds_config(filled, 2), allow_nan=False)
    return problems


def with_key(values: dict[str, Any], dotted: str, new: object) -> dict[str, Any]:
    """A copy with a key set; blocks are made on the way."""
    first, _, rest = dotted.partition(".")
    if not rest:
        return {**values, first: new}
    inner = values.get(first)
    return {**values, first: with_key(inner if isinstance(inner, dict) else {}, rest, new)}


def test_the_good_file_is_good(config: Config) -> None:
    assert check(config, json.dumps(GOOD).encode()) == []


MALFORMED: dict[str, list[bytes]] = {
    "ds-config-unreadable": [
        b"",
        b"{",
        b"\xff",
        b"\xef\xbb\xbf ",
        b"\0" * 10,
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"fp16": {}, "fp16": {}}',
        b'{"train_batch_size": ' + b"9" * 5000 + b"}",
        b'{"train_batch_size": 16, /* comment\n}',
    ],
    "ds-value-invalid": [
        b'{"train_batch_size": 1e999}',
        b'{"train_batch_size": NaN}',
        b'{"gradient_clipping": -Infinity}',
    ],
}


@pytest.mark.parametrize("code", MALFORMED)
def test_malformed_file_is_rejected(config: Config, code: str) -> None:
    for content in MALFORMED[code]:
        found = [problem for problem in check(config, content) if isinstance(problem, Problem)]
        assert code in codes(found), content[:50]


@given(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2), values=st.tuples(JSON, JSON))
@FUZZ_SETTINGS
def test_any_value_at_any_key(
    config: Config, keys: list[str], values: tuple[object, object]
) -> None:
    content = GOOD
    for key, value in zip(keys, values, strict=False):
        content = with_key(content, key, value)
    check(config, json.dumps(content).encode())


@pytest.mark.parametrize("shift", with_proofs([0, 1, 2], [1, 2]))
def test_every_kind_of_value_at_every_key(shift: int, config: Config) -> None:
    """Each kind at many keys, for every key another one with each shift."""
    values = [None, True, -1, 1e308, "auto", "x", [], {}, [[]], {"a": 1}, 0]
    for number, key in enumerate(KEYS):
        value = values[(3 * number + shift) % len(values)]
        check(config, json.dumps(with_key(GOOD, key, value)).encode())


@given(value=JSON)
@FUZZ_SETTINGS
def test_any_value_for_the_whole(config: Config, value: object) -> None:
    check(config, json.dumps(value).encode())


@given(at=st.integers(0, len(json.dumps(GOOD)) - 1), new=st.integers(0, 255))
@FUZZ_SETTINGS
def test_one_byte_changed(config: Config, at: int, new: int) -> None:
    content = bytearray(json.dumps(GOOD).encode())
    content[at] = new
    check(config, bytes(content))
