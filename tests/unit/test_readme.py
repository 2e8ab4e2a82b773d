"""The README's commands and the architecture's map of the code match the repository."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from megatron_ds.cli import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = REPOSITORY / "docs" / "development" / "architecture.md"


def test_the_code_map_lists_every_folder() -> None:
    folders = {path.parent.name for path in (REPOSITORY / "megatron_ds").glob("*/__init__.py")}
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)/` \|.*\|([^|]*)\|$", text, flags=re.MULTILINE)

    assert {folder for folder, _ in rows} == folders
    for folder, start in rows:
        for file in re.findall(r"`(.+?)`", start):
            assert (REPOSITORY / "megatron_ds" / folder / file).is_file(), file


def commands() -> list[list[str]]:
    blocks = re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = {words[1] for words in commands() if words[:1] == ["make"]}

    assert targets == {"demo", "test", "quick"}
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert "test-interop" in named
    for target in targets | named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_training_command_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/my_text_document.bin", "data/my_text_document.idx", "tokenizer/vocab.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tokenizer" / "merges.txt").touch()
    shutil.copy(REPOSITORY / "ds_configs" / "zero1.json", tmp_path / "ds_config.json")
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in commands() if "--num-layers" in words]

    config = arguments.parse(words[words.index("pretrain_gpt.py") + 1 :], world_size=8)

    assert config.parallel.tensor_model_parallel_size == 2
    assert config.given >= {"train_iters", "deepspeed_config"}
