"""From flags to datasets: splits, blends, caches and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data import build
from megatron_ds.data.build import Datasets, Share, build_datasets
from megatron_ds.data.gpt_dataset import TokenDataset
from megatron_ds.data.indexed import IndexedWriter

REPOSITORY = Path(__file__).resolve().parents[3]


def write(prefix: Path, documents: int = 40, first: int = 0, size: int = 7) -> str:
    """Document d is `size` tokens of the value first + d."""
    with IndexedWriter(prefix, "uint16") as writer:
        for number in range(documents):
            writer.add_document([first + number] * size)
    return str(prefix)


def datasets(config: DataConfig, samples: tuple[int, int, int], **changes: Any) -> Datasets:
    values: dict[str, Any] = {
        "seq_length": 5,
        "seed": 11,
        "tokenizer_fingerprint": "t",
        "vocab_size": 1000,
    }
    return build_datasets(config, num_samples=samples, **{**values, **changes})


def tokens_of(dataset: TokenDataset | None) -> set[int]:
    assert dataset is not None
    return {int(t) for i in range(len(dataset)) for t in dataset[i]}


def cached(folder: Path) -> int:
    return len(list(folder.glob("*.json")))


def test_parts_are_disjoint_and_long_enough(tmp_path: Path) -> None:
    config = DataConfig(data_path=(write(tmp_path / "p"),), split="80,10,10")
    built = datasets(config, (200, 9, 7))
    assert built.train is not None
    assert len(built.train) >= 200
    assert built.train[0].dtype == np.int64
    assert built.train[0].shape == (6,)
    assert tokens_of(built.train) == set(range(32))
    assert tokens_of(built.valid) == set(range(32, 36))
    assert tokens_of(built.test) == set(range(36, 40))


def test_parts_given_alone(tmp_path: Path) -> None:
    config = DataConfig(
        train_data_path=(write(tmp_path / "a"),),
        test_data_path=("1", write(tmp_path / "b", first=100), "0", str(tmp_path / "none")),
    )
    built = datasets(config, (30, 5, 5))
    assert tokens_of(built.train) <= set(range(40))
    assert built.valid is None
    assert tokens_of(built.test) <= set(range(100, 140))


def test_none_asked_and_none_given_are_none(tmp_path: Path) -> None:
    path = (write(tmp_path / "p"),)
    built = datasets(DataConfig(data_path=path), (10, 0, 0))
    assert (built.valid, built.test) == (None, None)
    built = datasets(DataConfig(data_path=path, split="90,10,0"), (10, 3, 3))
    assert built.valid is not None
    assert built.test is None


@pytest.mark.parametrize(
    ("split", "samples", "message"),
    [
        ("0,1,1", (1, 0, 0), "--split 0,1,1: leaves no documents for training"),
        (None, (1, 0, 3), "3 test samples are asked of .* but --split 969,30,1 leaves test none"),
        ("900,1,99", (1, 3, 0), "3 valid samples are asked of .* leaves valid none of its 40"),
        ("1,999,0", (1, 3, 0), "1 train samples are asked of .* leaves train none"),
    ],
)
def test_a_part_that_gets_nothing(
    tmp_path: Path, split: str | None, samples: tuple[int, int, int], message: str
) -> None:
    config = DataConfig(data_path=(write(tmp_path / "p"),), split=split)
    with pytest.raises(ValueError, match=message):
        datasets(config, samples)


def test_a_file_without_tokens(tmp_path: Path) -> None:
    config = DataConfig(train_data_path=(write(tmp_path / "p", documents=0),))
    with pytest.raises(ValueError, match="holds no tokens"):
        datasets(config, (1, 0, 0))


def test_16_bit_tokens_for_a_larger_vocabulary(tmp_path: Path) -> None:
    config = DataConfig(data_path=(write(tmp_path / "p"),))
    with pytest.raises(ValueError, match="another tokenizer"):
        datasets(config, (1, 0, 0), vocab_size=65537)


def test_blend_follows_the_weights(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", first=100)
    built = datasets(DataConfig(data_path=("3", a, "1", b), split="1"), (400, 0, 0))
    train = built.train
    assert train is not None
    assert len(train) == 400
    ids = [train.sample_id(i) for i in range(400)]
    assert sum(name.startswith("0/a:") for name in ids) == 300
    assert [name[:2] for name in ids[:8]].count("1/") == 2
    # 40 documents of 7 tokens in each, of which a sample takes 5
    assert built.shares == (
        Share("train", a, 0.75, 300, 300 * 5 / 280),
        Share("train", b, 0.25, 100, 100 * 5 / 280),
    )
    for position in range(8):
        low, high = (0, 40) if ids[position].startswith("0/") else (100, 140)
        assert all(low <= t < high for t in train[position])


def test_without_weights_each_file_gives_according_to_its_size(tmp_path: Path) -> None:
    paths = tuple(write(tmp_path / name, size) for name, size in (("a", 10), ("b", 30), ("c", 40)))
    built = datasets(DataConfig(data_path=paths, split="1,1"), (400, 80, 0))
    assert [(share.part, share.samples, share.weight) for share in built.shares] == [
        *(("train", samples, samples / 400) for samples in (50, 150, 200)),
        *(("valid", samples, samples / 80) for samples in (10, 30, 40)),
    ]
    assert len({share.epochs for share in built.shares if share.part == "train"}) == 1


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("1", "a", "2"), "WEIGHT PREFIX"),
        (("x", "a", "2", "b"), "the weight 'x'"),
        (("-1", "a"), "the weight '-1'"),
        (("nan", "a"), "the weight 'nan'"),
        (("0", "a", "0.0", "b"), "all weights are 0"),
    ],
)
def test_bad_blends(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        datasets(DataConfig(data_path=paths), (1, 0, 0))


def test_the_cache_is_read_and_its_name_hashes_what_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(data_path=(write(tmp_path / "p"),), split="80,20,0")
    folder = tmp_path / "index-cache"
    first = datasets(config, (20, 0, 0)).train
    assert first is not None
    assert cached(folder) == 1
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_indexes", None)
        again = datasets(config, (20, 0, 0)).train
    assert again is not None
    assert [again[i].tolist() for i in range(20)] == [first[i].tolist() for i in range(20)]
    count = 1
    for changes in ({"seed": 12}, {"seq_length": 6}, {"tokenizer_fingerprint": "u"}):
        datasets(config, (20, 0, 0), **changes)
        count += 1
        assert cached(folder) == count
    datasets(config, (21, 0, 0))
    datasets(dataclasses.replace(config, split="70,30,0"), (20, 0, 0))
    write(tmp_path / "p", size=8)
    datasets(config, (20, 0, 0))
    assert cached(folder) == count + 3


def test_where_the_cache_goes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = DataConfig(data_path=(write(tmp_path / "data" / "p"),))
    given = dataclasses.replace(config, data_cache_path=str(tmp_path / "given"))
    datasets(given, (5, 0, 0))
    assert cached(tmp_path / "given") == 1
    assert not (tmp_path / "data" / "index-cache").exists()
    # A file in the folder's place stands for a data folder that cannot be written.
    (tmp_path / "data" / "index-cache").write_text("")
    with pytest.raises(ValueError, match="--data-cache-path"):
        datasets(config, (5, 0, 0))
    datasets(config, (5, 0, 0), fallback_cache=str(tmp_path / "fallback"))
    assert cached(tmp_path / "fallback") == 1


def test_four_processes_at_once_read_the_same(tmp_path: Path) -> None:
    prefix = write(tmp_path / "p")
    code = (
        "import zlib\n"
        "from megatron_ds.config import DataConfig\n"
        "from megatron_ds.data.build import build_datasets\n"
        f"c = DataConfig(data_path=('1', {prefix!r}, '2', {prefix!r}), split='1')\n"
        "d = build_datasets(c, seq_length=5, seed=1, num_samples=(500, 0, 0),\n"
        "    tokenizer_fingerprint='t', vocab_size=100).train\n"
        "print(len(d), zlib.crc32(b''.join(d[i].tobytes() for i in range(500))))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert len(outputs) == 1
    assert outputs.pop().startswith("500 ")
