"""lm-evaluation-harness on our model gives what it gives on the same model of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.e2e.runs import REPOSITORY, Launcher

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")

TOOL = REPOSITORY / "tools" / "evaluate.py"
GOLDEN = REPOSITORY / "tests" / "golden" / "tokenizers"
QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " dog jumps over"], "answer": 0},
    {"question": "line one and ", "choices": ["paragraphs", "line two"], "answer": 1},
    {"question": "the lazy dog sleeps on and on and on", "choices": [" and", "."], "answer": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}{{choices[0]}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
}
NAMES = [f"local_{name}" for name in TASKS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the golden tokenizer, and the tasks."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "tokenizer").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / name, folder / "tokenizer")
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(folder / "tokenizer")
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=16, n_embd=32, n_layer=2, n_head=4
    )
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS), encoding="utf-8")
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(questions)}}
        content = {"task": f"local_{name}", "dataset_path": "json", "dataset_kwargs": files}
        content |= {"test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def manager(folder: Path) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder / "model"), device="cpu", batch_size=2)


@pytest.fixture
def ours(folder: Path) -> Iterator[Any]:
    """Created as by the harness's own command line."""
    from megatron_ds.evaluation.harness import HarnessModel

    arguments = {"load": f"hf:{folder / 'model'}", "fp32": True}
    model = HarnessModel.create_from_arg_obj(arguments, {"batch_size": 2, "device": None})
    yield model
    model.close()


def test_requests_are_answered_as_by_the_model_of_transformers(
    manager: Any, theirs: Any, ours: Any
) -> None:
    requests: dict[str, list[Any]] = {}
    for task in manager.load(NAMES)["tasks"].values():
        task.build_all_requests()
        for each in task.instances:
            requests.setdefault(each.request_type, []).append(each)
    assert requests.keys() == {"loglikelihood", "loglikelihood_rolling", "generate_until"}
    for kind, asked in requests.items():
        expected, answers = getattr(theirs, kind)(asked), getattr(ours, kind)(asked)
        if kind == "generate_until":
            assert answers == expected
        elif kind == "loglikelihood":
            assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
            values = [value for value, _ in expected]
            assert [value for value, _ in answers] == pytest.approx(values, abs=1e-4)
        else:
            assert answers == pytest.approx(expected, abs=1e-4)


def test_empty_and_long_texts_have_answers(ours: Any) -> None:
    """The harness's own model ends with an error."""
    from lm_eval.api.instance import Instance

    def ask(kind: str, *arguments: object) -> list[Any]:
        return list(getattr(ours, kind)([Instance(kind, {}, arguments, 0)]))

    assert ask("loglikelihood", "the", "") == [(0.0, True)]
    ((long, _),) = ask("loglikelihood", "the", " quick brown fox" * 9)
    assert long < -10
    assert ask("loglikelihood_rolling", "") == [0]
    (text,) = ask("generate_until", "the quick" * 30, {"until": "x", "max_gen_toks": 400})
    assert "x" not in text


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_share_the_requests(
    folder: Path, manager: Any, theirs: Any, launcher: Launcher, tmp_path: Path, tp_size: int
) -> None:
    output = tmp_path / "results.json"
    settings = {
        "load": f"hf:{folder / 'model'}",
        "tasks": (",".join(NAMES[:2]), *NAMES[2:]),
        "include_path": folder,
        "tensor_model_parallel_size": tp_size,
        "output": output,
    }
    launcher.start(settings, ranks=2, script=TOOL).succeed()
    results = json.loads(output.read_text(encoding="utf-8"))["results"]

    expected = lm_eval.simple_evaluate(theirs, tasks=NAMES, task_manager=manager)["results"]
    for name, metric in zip(NAMES, ("acc", "bits_per_byte", "exact_match"), strict=True):
        value = expected[name][f"{metric},none"]
        assert results[name][f"{metric},none"] == pytest.approx(value, rel=1e-5)
