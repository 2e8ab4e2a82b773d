"""lm-evaluation-harness on our model gives what it gives on the same model of transformers."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from tokenizers.processors import TemplateProcessing

from megatron_ds import cli
from megatron_ds.config import Config
from megatron_ds.evaluation import command, in_training
from megatron_ds.evaluation.options import Options
from tests.e2e.runs import REPOSITORY, Launcher, evaluations, steps, to_flags
from tests.problems import raises_problem
from tests.proofs.cases import with_proofs

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
OVERLAP = 10
"""Tokens by which a window is further than the one before it."""
IMPORTED = ("datasets", "lm_eval", "lm_eval.models.utils", "lm_eval.tasks")
"""What the module of the harness imports, which takes seconds."""


def save_model(folder: Path, tokenizer: Any) -> None:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=16, n_embd=32, n_layer=2, n_head=4
    )
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the golden tokenizer, and the tasks."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "tokenizer").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / name, folder / "tokenizer")
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(folder / "tokenizer")
    save_model(folder / "model", tokenizer)
    library = tokenizer.backend_tokenizer
    library.add_special_tokens(["<|begin|>"])
    begin = ("<|begin|>", library.token_to_id("<|begin|>"))
    library.post_processor = TemplateProcessing("<|begin|> $A", special_tokens=[begin])
    names = {"bos_token": begin[0], "eos_token": tokenizer.eos_token}
    with_begin = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **names)
    save_model(folder / "begin", with_begin)
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


@pytest.fixture
def kind() -> str:
    """Folder of the model."""
    return "model"


@pytest.fixture
def theirs(folder: Path, kind: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder / kind), device="cpu", batch_size=2)


@pytest.fixture
def ours(folder: Path, kind: str) -> Iterator[Any]:
    """Created as by the harness's own command line."""
    from megatron_ds.evaluation.harness import HarnessModel

    arguments = {"load": f"hf:{folder / kind}", "fp32": True}
    model = HarnessModel.create_from_arg_obj(arguments, {"batch_size": 2, "device": None})
    yield model
    model.close()


@pytest.mark.parametrize("kind", ["model", "begin"])
def test_requests_are_answered_as_by_the_model_of_transformers(
    manager: Any, theirs: Any, ours: Any
) -> None:
    """Also of a model whose tokenizer begins texts with a token.

    Claim (serving): lm-evaluation-harness gets log-likelihoods, also of complete texts, and
    continuations as from its own model of transformers
    """
    from lm_eval.api.instance import Instance

    requests: dict[str, list[Any]] = {}
    for task in manager.load(NAMES)["tasks"].values():
        task.build_all_requests()
        for each in task.instances:
            requests.setdefault(each.request_type, []).append(each)
    assert requests.keys() == {"loglikelihood", "loglikelihood_rolling", "generate_until"}
    requests["loglikelihood"] += [
        Instance("loglikelihood", {}, arguments, 0)
        for arguments in (("", "the fox"), ("the", " dog"))
    ]
    for name, asked in requests.items():
        expected = getattr(theirs, name)(asked)
        answers = getattr(ours, name)(asked)
        if name == "generate_until":
            assert answers == expected
        elif name == "loglikelihood":
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


def test_sampled_texts_do_not_depend_on_the_batch(ours: Any) -> None:
    """Claim (serving): sampled continuations do not depend on the batch"""
    from lm_eval.api.instance import Instance

    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    prompts = ["the quick brown", "line", "the quick brown", "dog jumps over the lazy"]
    asked = [Instance("generate_until", {}, (each, settings), 0) for each in prompts]
    together = ours.generate_until(asked)
    assert ours.generate_until(asked) == together
    assert [ours.generate_until([each])[0] for each in asked[:2]] == together[:2]
    assert ours.generate_until([asked[3]]) == together[3:]
    assert together[0] != together[2], "a repeated request is another sample"


@pytest.fixture(scope="module")
def run_settings(folder: Path) -> dict[str, Any]:
    """A run with dropout of a model like that of the tools' tests."""
    return {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "micro_batch_size": 8,
        "global_batch_size": 16,
        "lr": 1e-2,
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": GOLDEN / "vocab.json",
        "merge_file": GOLDEN / "merges.txt",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "log_interval": 1,
        "num_workers": 0,
        "train_iters": 4,
        "zero_stage": 3,
    }


def test_a_run_evaluates_tasks_as_the_tool_and_trains_as_without(
    folder: Path, run_settings: dict[str, Any], launcher: Launcher, tmp_path: Path
) -> None:
    """With a stop and a resume between the evaluations; then --eval-only.

    Claim (serving): a run that evaluates tasks trains bit for bit as without, also resumed; tasks
    and files have the results of tools/evaluate.py, and so has `--eval-only`
    """
    corpus = GOLDEN / "corpus.jsonl"
    cloze = tmp_path / "cloze.jsonl"
    cloze.write_text('{"text": "the quick brown fox"}\n{"text": "line one and line two"}\n')
    data = {"data_path": GOLDEN / "GPT2BPETokenizer", "split": "1,0,0", "eval_iters": 0}
    data["data_cache_path"] = tmp_path / "cache"
    run = tmp_path / "run"
    without = tmp_path / "without"
    launcher.start({**run_settings, **data, "save": without}, ranks=2).succeed()
    files = f"perplexity={corpus}", f"LAMBADA={cloze}"
    tasks = {"eval_tasks": files, "eval_tasks_interval": 2, "overlapping_eval": OVERLAP}
    resumed = {**run_settings, **data, **tasks, "save": run, "load": run, "save_interval": 2}
    of_harness = {"eval_tasks": (",".join(NAMES), *files), "eval_tasks_include_path": folder}
    stopped = {**resumed, **of_harness, "exit_interval": 3}
    printed = launcher.start(stopped, ranks=2, modules=IMPORTED).succeed()
    launcher.start(resumed, ranks=2).succeed()
    assert steps(run) == steps(without)

    found = evaluations(run)
    assert [each["iteration"] for each in found] == [2] * 5 + [4] * 2
    names = [corpus.name, f"LAMBADA/{cloze.name}"]
    assert [each.get("task", each.get("group")) for each in found] == [*names, *NAMES, *names]
    choice, rolling, generation, perplexity, lambada = found[2:]
    assert f" {NAMES[0]} at iteration 2 | acc: {choice['acc']:.6E} |\n" in printed
    assert f"{corpus.name} loss at iteration 2 | lm loss value:" in printed
    assert "Tokenizing inputs" not in printed

    def by_the_tool(**settings: Any) -> Any:
        output = tmp_path / "results.json"
        words = to_flags({"load": run, **settings, "output": output})
        command.run(cli.parse(Options, words))  # here, where the harness is imported already
        return json.loads(output.read_text(encoding="utf-8"))

    middle = run / "global_step2"
    results = by_the_tool(load=middle, tasks=tuple(NAMES), include_path=folder)["results"]
    for name, record in zip(NAMES, (choice, rolling, generation), strict=True):
        (metric,) = record.keys() - {"iteration", "task"}
        assert record[metric] == pytest.approx(results[name][f"{metric},none"], rel=1e-5)
    expected = by_the_tool(valid_data=cloze, task="LAMBADA")
    assert lambada["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    expected = by_the_tool(valid_data=corpus, overlapping_eval=OVERLAP)
    assert perplexity["validation_loss"] == pytest.approx(expected["loss"], rel=1e-6)

    only = {"eval_only": (corpus, GOLDEN / "GPT2BPETokenizer"), "overlapping_eval": OVERLAP}
    log = tmp_path / "only.jsonl"
    settings = {**run_settings, **only, "load": run, "metrics_jsonl": log, "zero_stage": 1}
    launcher.start({**settings, "train_iters": 9}).succeed()
    of_files = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [each["group"] for each in of_files] == [corpus.name, "GPT2BPETokenizer"]
    for record in of_files:
        assert record["iteration"] == 4
        assert record["validation_loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert record["ppl"] == pytest.approx(expected["perplexity"], rel=1e-5)


def test_unknown_tasks_are_reported_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): unknown tasks, missing files and unusable documents are errors before the
    first step"""
    from megatron_ds.evaluation import harness

    manager = harness.TaskManager
    # Reading the harness's own tasks takes seconds.
    own = functools.partial(manager, include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", lambda include_defaults, **rest: own(**rest))
    options = Config().with_values(
        {"eval_tasks": ("local_choic", *NAMES), "eval_tasks_include_path": (str(folder),)}
    )
    (problem,) = in_training.problems(options.evaluation)
    assert (problem.code, problem.fields) == ("harness-task-unknown", ("eval_tasks",))
    assert "local_choic: no such task; did you mean local_choice" in str(problem)
    assert "--eval-tasks-include-path" in problem.render()


def test_data_that_cannot_be_downloaded_is_a_problem_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", fail)
    monkeypatch.setattr(command, "loaded_model", fail)
    remote = {"task": "remote", "dataset_path": "nobody/nothing", "output_type": "multiple_choice"}
    remote |= {"test_split": "test", "doc_to_text": "", "doc_to_target": 0, "doc_to_choice": "a"}
    (tmp_path / "remote.yaml").write_text(yaml.safe_dump(remote), encoding="utf-8")
    words = ["--load", f"hf:{folder / 'model'}", "--tasks", "remote"]
    options = cli.parse(Options, [*words, "--include-path", str(tmp_path)])
    with raises_problem("harness-data-missing", contains="no network"):
        command.run(options)


def test_files_are_evaluated_with_a_checkpoint_only(
    run_settings: dict[str, Any], launcher: Launcher
) -> None:
    result = launcher.start({**run_settings, "eval_only": GOLDEN / "corpus.jsonl"}).wait()
    assert "[no-checkpoint-to-evaluate]" in result.output


@pytest.mark.parametrize("tp_size", with_proofs([1, 2], [1]))
def test_ranks_share_the_requests(
    folder: Path, manager: Any, theirs: Any, launcher: Launcher, tmp_path: Path, tp_size: int
) -> None:
    """Claim (serving): copies and shards of a model share the harness's requests, and one rank
    prints its log"""
    output = tmp_path / "results.json"
    settings = {
        "load": f"hf:{folder / 'model'}",
        "tasks": (",".join(NAMES[:2]), *NAMES[2:]),
        "include_path": folder,
        "tensor_model_parallel_size": tp_size,
        "output": output,
    }
    printed = launcher.start(settings, ranks=2, script=TOOL, modules=IMPORTED).succeed()
    assert printed.count("Tokenizing inputs: 100%") == 1, "the log of one rank"
    results = json.loads(output.read_text(encoding="utf-8"))["results"]

    expected = lm_eval.simple_evaluate(theirs, tasks=NAMES, task_manager=manager)["results"]
    for name, metric in zip(NAMES, ("acc", "bits_per_byte", "exact_match"), strict=True):
        value = expected[name][f"{metric},none"]
        assert results[name][f"{metric},none"] == pytest.approx(value, rel=1e-5)
