"""The command line of tools/inspect_checkpoint.py: description, comparison, verification."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ds.checkpoint.metadata import MANIFEST, RUN, read_run
from megatron_ds.checkpoint.universal.writer import convert_checkpoint
from megatron_ds.conversion.inspect import command
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.safetensors_files import SINGLE
from megatron_ds.conversion.weights_folder import write_weights_folder
from tests.problems import printed_codes
from tests.unit.checkpoint.fakes import flipped, truncated
from tests.unit.checkpoint.native_writer import MODEL, STEPS, random_states, write_checkpoint
from tests.unit.conftest import Run
from tests.unit.conversion.foreign_trees import write_tree
from tests.unit.conversion.hf_models import random_model

TOOL = command
TP2 = {"tp": 2, "dp": 2, "stage": 1}


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, torch.Tensor]]:
    return random_states()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, states: Any) -> Path:
    """--save folders of the same states in two layouts."""
    folder = tmp_path_factory.mktemp("saved")
    write_checkpoint(folder / "one", states, iteration=4)
    write_checkpoint(folder / "one", states)
    write_checkpoint(folder / "four", states, **TP2)
    return folder


def described(run: Run, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").out)["checkpoint"]
    return found


def compared(run: Run, *arguments: object, status: int = 0) -> dict[str, Any]:
    printed = run(*arguments, "--json", status=status)
    found: dict[str, Any] = json.loads(printed.out)["comparison"]
    assert found["is_equal"] == (status == 0)
    return found


def test_a_training_checkpoint_is_described(saved: Path, run: Run) -> None:
    found = described(run, saved / "four")
    assert (found["format"], found["path"]) == ("native", str(saved / "four" / "global_step8"))
    assert found["progress"]["iteration"] == 8
    assert found["optimizer"] == {"steps": STEPS}
    assert found["layout"]["tensor_model_parallel_size"] == 2
    assert found["settings"]["model"]["hidden_size"] == 8
    assert "num_query_groups" not in found["settings"]["model"]  # the default
    assert found["data"] == [{"name": "corpus", "samples": 32, "weight": 1.0}]
    tensors = {(each["kind"], each["name"]): each for each in found["tensors"]}
    assert {kind for kind, _ in tensors} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    qkv = tensors["weight", "layers.1.attention.qkv.weight"]
    assert (qkv["shape"], qkv["dtype"], qkv["bytes"]) == ([24, 8], "float32", 24 * 8 * 4)
    assert qkv["shards"] == "tensor parallel 2 x [12, 8]"
    table = tensors["exp_avg", "embedding.word.weight"]
    assert table["shape"] == [MODEL.vocab_size, 8]  # stored with 12 rows
    files = {name: (saved / "four" / "global_step8" / name) for name in found["files"]}
    assert len(files) == 8
    assert found["files"] == {name: path.stat().st_size for name, path in files.items()}


def test_the_text_shows_layers_as_one(saved: Path, run: Run) -> None:
    text = run(saved / "one").out
    assert f"{saved / 'one' / 'global_step8'}: native, iteration 8" in text
    assert "layers.0-1.attention.qkv.weight" in text
    assert "steps 7" in text
    assert "corpus: 32 samples read, weight 1" in text
    every = run(saved / "one", "--tensors").out
    assert "layers.0.attention.qkv.weight" in every


def test_layouts_with_the_same_states_are_equal(saved: Path, run: Run) -> None:
    """Claim (checkpoints): `inspect_checkpoint.py` compares weights and optimizer states across
    layouts and formats"""
    found = compared(run, saved / "one", saved / "four")
    count = len(random_states()["master"])
    kinds = ("weight", "master", "exp_avg", "exp_avg_sq")
    assert found["num_equal"] == dict.fromkeys(kinds, count)
    assert "equal" in run(saved / "one", saved / "four").out.splitlines()[-1]


def test_a_universal_checkpoint_equals_its_source(saved: Path, tmp_path: Path, run: Run) -> None:
    """Rounded weights included; its files are verified with those of the --save folder."""
    save = shutil.copytree(saved / "four", tmp_path / "save")
    folder = save / "global_step8_universal"
    convert_checkpoint(read_run(save / "global_step8"), folder, lambda name, size: None)
    assert described(run, folder)["format"] == "universal"
    assert compared(run, save, folder)["num_equal"]["exp_avg"] > 10
    assert problems_of(run, save, status=0) == []
    for path in (folder / "zero" / "final_norm.weight" / "exp_avg.pt", folder / "run.json"):
        original = path.read_bytes()
        path.write_bytes(flipped(original, random.Random(1)))
        assert path.name in problems_of(run, save)[0]
        path.write_bytes(original)


def test_differences_are_listed_by_tensor(
    tmp_path: Path, saved: Path, run: Run, states: Any
) -> None:
    """Claim (checkpoints): `inspect_checkpoint.py` compares weights and optimizer states across
    layouts and formats"""
    changed = {kind: {n: t.clone() for n, t in each.items()} for kind, each in states.items()}
    moment = changed["exp_avg"]["layers.1.mlp.fc_in.weight"]
    scale = float(moment.abs().max())
    moment[0, 0] = torch.nan
    write_checkpoint(tmp_path / "nan", changed)
    moment[5, 3] += 0.25
    write_checkpoint(tmp_path / "both", changed, **TP2)
    # nan equals nan.
    (difference,) = compared(run, tmp_path / "nan", tmp_path / "both", status=1)["differences"]
    assert (difference["kind"], difference["name"]) == ("exp_avg", "layers.1.mlp.fc_in.weight")
    assert (difference["num_different"], difference["max_abs"]) == (1, pytest.approx(0.25))
    (difference,) = compared(run, saved / "one", tmp_path / "both", status=1)["differences"]
    assert (difference["num_different"], difference["max_abs"]) == (2, torch.inf)
    moment[0, 0] = states["exp_avg"]["layers.1.mlp.fc_in.weight"][0, 0]
    write_checkpoint(tmp_path / "one", changed, **TP2)
    (difference,) = compared(run, saved / "one", tmp_path / "one", status=1)["differences"]
    assert difference["num_different"] == 1
    assert difference["max_abs"] == pytest.approx(0.25, abs=1e-6)
    assert difference["max_rel"] == pytest.approx(0.25 / scale, rel=1e-5)
    text = run(saved / "one", tmp_path / "one", status=1).out
    assert "exp_avg layers.1.mlp.fc_in.weight: 1 of 256 values differ, by up to 0.25" in text


def test_missing_names_types_and_shapes_are_differences(
    tmp_path: Path, run: Run, states: Any
) -> None:
    """Claim (checkpoints): `inspect_checkpoint.py` compares weights and optimizer states across
    layouts and formats"""
    model = random_model("llama")
    model.save_pretrained(tmp_path / "theirs")
    write_weights_folder(open_source(tmp_path / "theirs"), tmp_path / "ours")
    name = "final_norm.weight"
    write_weights_folder(open_source(tmp_path / "ours").to(torch.bfloat16), tmp_path / "half")
    assert compared(run, tmp_path / "theirs", tmp_path / "ours")["differences"] == []
    different = compared(run, tmp_path / "ours", tmp_path / "half", status=1)["differences"]
    assert {tuple(each["dtypes"]) for each in different} == {("float32", "bfloat16")}
    (norm,) = [each for each in different if each["name"] == name]
    assert norm["num_different"] == 32
    assert 0 < norm["max_rel"] < 2**-8
    write_weights_folder(open_source(tmp_path / "half").to(torch.float32), tmp_path / "rounded")
    types = compared(run, tmp_path / "half", tmp_path / "rounded", status=1)["differences"]
    assert {each["num_different"] for each in types} == {0}
    assert "the same values" in run(tmp_path / "half", tmp_path / "rounded", status=1).out
    write_checkpoint(tmp_path / "native", states)
    found = compared(run, tmp_path / "ours", tmp_path / "native", status=1)
    assert "weight embedding.position.weight" in found["only_in_second"]
    assert found["uncompared"] == ["master", "exp_avg", "exp_avg_sq"]
    shapes = {each["name"]: each["shapes"] for each in found["differences"]}
    assert shapes[name] == [list(model.model.norm.weight.shape), [8]]
    assert f"weight {name}: [" in run(tmp_path / "ours", tmp_path / "native", status=1).out


def test_every_kind_of_megatron_checkpoint_is_described(
    megatron_checkpoints: Path, run: Run
) -> None:
    folders = [path for path in megatron_checkpoints.iterdir() if path.name != "data"]
    formats = set()
    for folder in sorted(folders):
        if not (folder / "reference.npz").is_file():
            continue
        found = described(run, folder)
        formats.add(found["format"])
        assert found["parameters"] > 1000
        assert found["progress"]["iteration"] == 3
        if folder.name != "mlm0190_gpt":  # whose states of the optimizer are not in the archive
            assert compared(run, folder, folder)["num_equal"]["weight"] > 10
    assert formats == {"megatron", "megatron-deepspeed", "torch_dist"}


# Verification


def problems_of(run: Run, *arguments: object, status: int = 1) -> list[str]:
    """The reported problems; the text, too, reports each."""
    printed = run(*arguments, "--verify", "--json", status=status)
    found = json.loads(printed.out)["verification"]
    texts = [problem["text"] for each in found for problem in each["problems"]]
    assert all(text in printed.err for text in texts)
    return texts


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("change", [flipped, truncated])
def test_any_flipped_bit_or_truncation_is_reported_with_its_file(
    saved: Path, tmp_path: Path, run: Run, change: Callable[[bytes, random.Random], bytes]
) -> None:
    """Claim (checkpoints): `inspect_checkpoint.py --verify` names every file with a flipped bit,
    truncated, missing or unlisted, and stale pointers"""
    folder = shutil.copytree(saved / "four", tmp_path / "save")
    draw = random.Random(1)
    files = list(files_below(folder / "global_step8"))
    assert {RUN, MANIFEST} < {path.name for path in files}
    assert problems_of(run, folder, status=0) == []
    for path in files:
        original = path.read_bytes()
        for _ in range(3):
            path.write_bytes(change(original, draw))
            (text,) = problems_of(run, folder / "global_step8")
            assert path.name in text
        path.write_bytes(original)
    assert problems_of(run, folder / "global_step8", status=0) == []


def test_every_damaged_missing_and_unlisted_file_is_reported_at_once(
    saved: Path, tmp_path: Path, run: Run
) -> None:
    """Claim (checkpoints): `inspect_checkpoint.py --verify` names every file with a flipped bit,
    truncated, missing or unlisted, and stale pointers"""
    folder = shutil.copytree(saved / "four", tmp_path / "save")
    path = folder / "global_step8"
    (path / "mp_rank_00_model_states.pt").unlink()
    with (path / "zero_pp_rank_1_mp_rank_01_optim_states.pt").open("ab") as file:
        file.write(b"x")
    (path / RUN).write_bytes((path / RUN).read_bytes().replace(b"corpus", b"Corpus"))
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab.json").write_text("{}")
    texts = problems_of(run, folder)
    names = ("mp_rank_00_model", "zero_pp_rank_1_mp_rank_01", RUN, "tokenizer/vocab.json")
    assert len(texts) == len(names)
    assert all(any(name in text for text in texts) for name in names)


@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("text", ["global_step9", "", "8\0", "global_step4"])
def test_a_stale_pointer_is_reported(
    saved: Path, tmp_path: Path, run: Run, pointer: str, text: str
) -> None:
    """Claim (checkpoints): `inspect_checkpoint.py --verify` names every file with a flipped bit,
    truncated, missing or unlisted, and stale pointers"""
    folder = shutil.copytree(saved / "one", tmp_path / "save")
    (folder / pointer).write_text(text)
    assert len(problems_of(run, folder)) == 1


def test_all_checkpoints_of_a_folder_are_verified(saved: Path, tmp_path: Path, run: Run) -> None:
    folder = shutil.copytree(saved / "one", tmp_path / "save")
    (folder / "global_step4" / RUN).write_text("{}")
    (text,) = problems_of(run, folder)
    assert RUN in text
    (folder / "global_step4" / MANIFEST).unlink()
    (text,) = problems_of(run, folder)
    assert MANIFEST in text
    renamed = (folder / "global_step8").rename(folder / "global_step12")
    assert "global_step8" in problems_of(run, renamed)[0]


def test_formats_without_checksums_are_read_completely(
    megatron_checkpoints: Path, tmp_path: Path, run: Run
) -> None:
    folder = shutil.copytree(megatron_checkpoints / "mlm25_tp1", tmp_path / "legacy")
    assert "no checksums of its own" in run(folder, "--verify").out
    (path,) = folder.rglob("model_optim_rng.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "model_optim_rng.pt" in problems_of(run, folder)[0]
    random_model("llama").save_pretrained(tmp_path / "theirs")
    assert problems_of(run, tmp_path / "theirs", status=0) == []


def test_a_folder_of_weights_is_verified(tmp_path: Path, run: Run) -> None:
    random_model("llama").save_pretrained(tmp_path / "theirs")
    write_weights_folder(open_source(tmp_path / "theirs"), tmp_path / "ours")
    assert problems_of(run, tmp_path / "ours", status=0) == []
    tensors = load_file(tmp_path / "ours" / SINGLE)
    tensors["final_norm.weight"][0] += 1
    save_file(tensors, tmp_path / "ours" / SINGLE, {"format": "pt"})
    assert SINGLE in problems_of(run, tmp_path / "ours")[0]


# Errors


def test_wrong_paths_are_rejected(tmp_path: Path, saved: Path, run: Run) -> None:
    def codes(*arguments: object, status: int) -> list[str]:
        return printed_codes(run(*arguments, status=status).err)

    missing = ["checkpoint-folder-missing"]
    assert codes(tmp_path / "gone", status=2) == missing
    assert codes(saved / "one", tmp_path / "gone", status=2) == missing
    assert codes(saved / "one" / "latest", status=2) == ["load-is-a-file"]
    foreign = write_tree("nanochat", tmp_path / "foreign")
    assert codes(saved / "one", foreign / "model_000010.pt", status=2) == ["foreign-nanochat"]
    for flags in ((), ("--verify",)):
        assert codes(foreign, *flags, status=2) == ["foreign-nanochat"]
    shutil.rmtree(foreign)
    for flags in ((), ("--verify",), (saved / "one",)):
        assert codes(tmp_path, *flags, status=1) == ["weights-format-unknown"]
    assert codes(f"hf:{saved / 'one'}", status=1) == ["hf-folder-without-config"]
    assert codes(status=2) == ["required"]
