"""The command line of generation: options, problems and output, without a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_ds import cli
from megatron_ds.config import ModelConfig, RuntimeConfig
from megatron_ds.inference.cli import loaded_model, model_conflicts
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from megatron_ds.inference.prompts import Prompt, read_prompt_file
from megatron_ds.inference.samples.command import batches_of
from megatron_ds.inference.samples.options import Options
from megatron_ds.inference.samples.output import Continuation, shown, write_texts
from megatron_ds.launch.ranks import distributed
from megatron_ds.tokenizer import Tokenizer
from tests.problems import codes, fields, printed_codes, raises_problem
from tests.tables import tables
from tests.unit.conversion.foreign_trees import write_tree

TABLES = tables(__file__)

Codes = Callable[..., list[str]]


class Words(Tokenizer):
    """Tokenizer with one id per word; id 9 is the end-of-document token."""

    eod = 9

    def encode(self, text: str) -> list[int]:
        if "?" in text:
            raise ValueError("no such word")
        return [len(word) for word in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(map(self.encode, texts))

    def decode(self, ids: Any) -> str:
        return "é" + " ".join("x" * number for number in ids)


def parse(*arguments: object) -> Options:
    return cli.parse(Options, [str(argument) for argument in arguments])


@pytest.fixture
def codes_of(capsys: pytest.CaptureFixture[str]) -> Codes:
    """The codes that a function prints, by default `parse`, before it exits with status 2."""

    def codes_of(*arguments: object, function: Callable[..., object] = parse) -> list[str]:
        with pytest.raises(SystemExit) as end:
            function(*arguments)
        assert end.value.code == 2
        return printed_codes(capsys.readouterr().err)

    return codes_of


def test_sampling_flags_have_aliases_and_the_defaults_of_the_forks(tmp_path: Path) -> None:
    options = parse("--load", tmp_path, "--top_k", 5, "--top-p", 0.5, "--tokens_to_generate", 7)
    assert (options.sampling, options.out_seq_length) == (SamplingParams(top_k=5, top_p=0.5), 7)
    options = parse("--load", tmp_path)
    assert options.sampling == SamplingParams(1.0, 0, 0.0, False, 1234)
    assert options.is_interactive
    assert options.checkpoint.precision is None
    options = parse("--load", tmp_path, "--prompt", "a b", "--prompts", "c", "d")
    assert (options.prompt, options.is_interactive) == (("a b", "c", "d"), False)


def test_default_length_is_limited_by_the_training_sequence(tmp_path: Path) -> None:
    def config(*flags: object) -> GenerationConfig:
        return parse("--load", tmp_path, *flags).generation_config(ModelConfig(seq_length=64), 9)

    assert config() == GenerationConfig(1024, SamplingParams(), 9, 64, use_cache=True)
    free = GenerationConfig(900, SamplingParams(), 9, None, use_cache=False)
    assert config("--out-seq-length", 900, "--recompute") == free


def test_a_text_is_finished_if_it_has_an_end_token() -> None:
    tokenizer = Words()
    tokenizer.further_ends = frozenset({7, 8})
    for last, is_finished in ((7, True), (8, True), (9, True), (6, False)):
        continuation = Continuation(Prompt("a", [1]), [2, last], None)
        line = shown(continuation, 1, tokenizer, as_json=True)
        ids = [2] if is_finished else [2, last]
        expected = {"prompt": "a", "text": tokenizer.decode(ids), "length": 2}
        assert json.loads(line) == {**expected, "finished": is_finished}


def test_training_flags_are_separated_from_tool_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(
        "--load",
        tmp_path,
        "--num-layers",
        2,
        "--vocab-file",
        "v.json",
        "--lr",
        0.1,
        "--min-lr",
        0,
        "--use-flash-attn",
        "--local_rank=1",
        "--glu-activation",
        "geglu",
        "--seed",
        2,
        "--bf16",
    )

    assert options.given_in("model") == {"num_layers": 2, "activation": "geglu"}
    assert options.given_in("tokenizer") == {"vocab_file": "v.json"}
    assert options.ineffective_flags == ["--lr", "--min-lr"]
    assert (options.sampling.seed, options.checkpoint.precision) == (2, "bf16")
    assert printed_codes(capsys.readouterr().err) == ["ignored-flag"]


def test_peer_ranks_wait_indefinitely_for_typed_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[RuntimeConfig] = []
    monkeypatch.setattr(distributed, "init_distributed", used.append)

    def minutes(*arguments: object, endless: bool) -> float:
        options = parse("--load", tmp_path, *arguments)
        with contextlib.suppress(ValueError), loaded_model(options, None, endless=endless):
            pass
        return used[-1].distributed_timeout_minutes

    assert minutes(endless=True) > 60 * 24
    assert minutes(endless=False) == 10.0
    assert minutes("--distributed-timeout-minutes", 3, endless=True) == 3.0


def test_all_problems_are_reported_at_once(tmp_path: Path, codes_of: Codes) -> None:
    result = codes_of(
        "--load",
        tmp_path / "no",
        "--prompt",
        "a",
        "--num-samples",
        -1,
        "--temperature",
        0,
        "--tensor-model-parallel-size",
        3,
        "--bf16",
        "--fp16",
        "--top-k",
        -1,
        "--genfile",
        tmp_path / "no" / "x",
        "--out-seq-length",
        0,
        "--micro-batch-size",
        0,
        "--sample-output-file",
        tmp_path,
        "--unheard-of",
        3,
    )

    assert Counter(result) == TABLES["problems"]


def test_another_programs_checkpoint_is_a_problem_of_the_flags(
    tmp_path: Path, codes_of: Codes
) -> None:
    folders = [write_tree(name, tmp_path / name) for name in ("nanochat", "nanoGPT")]
    found = codes_of("--load", folders[0], "--merge-with", folders[1])
    assert sorted(found) == ["foreign-nanochat", "foreign-nanogpt"]


@pytest.mark.parametrize(("arguments", "code"), TABLES["invalid_options_are_reported"])
def test_invalid_options_are_reported(
    arguments: tuple[str, ...], code: str, codes_of: Codes
) -> None:
    assert codes_of(*arguments) == [code]


SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
MODEL = ModelConfig(**SHAPE, seq_length=16, vocab_size=91)


@pytest.mark.parametrize("given", TABLES["model_flags_may_repeat_the_checkpoint"])
def test_model_flags_may_repeat_the_checkpoint(given: dict[str, Any]) -> None:
    assert list(model_conflicts(given, MODEL, null_tokenizer=True)) == []


def test_different_model_flags_are_reported_with_both_values() -> None:
    given = {"hidden_size": 64, "max_position_embeddings": 32, "vocab_size": 91}

    problems = list(model_conflicts(given, MODEL, null_tokenizer=True))

    assert codes(problems) == ["flag-differs-from-checkpoint"] * 3
    assert fields(problems) == [("hidden_size",), ("max_position_embeddings",), ("vocab_size",)]
    for problem, values in zip(problems, ((64, 32), (32, 16), (91, 90)), strict=True):
        assert all(str(value) in str(problem) for value in values)


def batches(options: Options, problems: Any = lambda _: []) -> list[list[Prompt]]:
    return list(batches_of(options, Words(), problems))


def test_file_has_one_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a bb\n\nccc\n", encoding="utf-8")

    options = parse("--load", tmp_path, "--sample-input-file", path, "--micro-batch-size", 2)
    result = batches(options)

    # An empty prompt starts from the end-of-document token.
    pair = [Prompt("a bb", [1, 2]), Prompt("", [9])]
    assert result == [pair, [Prompt("ccc", [3])]]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "in.txt",
            "\ufeffa\u2028b\r\nc\x0b\x0c\x1c\x85d \n\ne\rf\n".encode(),
            ["a\u2028b", "c\x0b\x0c\x1c\x85d ", "", "e\rf"],
        ),
        ("in.txt", b"a\nb", ["a", "b"]),
        ("in.txt", b"", []),
        (
            "in.jsonl",
            b'{"prompt": "a\\nb", "text": "no"}\n"c"\r\n{"text": ""}\n',
            ["a\nb", "c", ""],
        ),
    ],
)
def test_prompt_file_is_split_at_line_ends_only(
    tmp_path: Path, name: str, content: bytes, expected: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_prompt_file(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "code", "line"),
    [
        ("in.txt", b"a\ncaf\xe9\n", "prompt-file-not-utf8", 2),
        ("in.jsonl", b'"a"\n{"no": "b"}\n', "prompt-line-invalid", 2),
        ("in.jsonl", b'"a"\n"b"\n{"text": 3}', "prompt-line-invalid", 3),
        ("in.jsonl", b"\n", "prompt-line-invalid", 1),
    ],
)
def test_lines_without_a_prompt_are_reported_by_number(
    tmp_path: Path, name: str, content: bytes, code: str, line: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with raises_problem(code, "sample_input_file", contains=f"{name}:{line}: "):
        read_prompt_file(tmp_path / name)


def test_prompts_that_cannot_be_encoded_are_reported_together(
    tmp_path: Path, codes_of: Codes
) -> None:
    options = parse("--load", tmp_path, "--prompt", "bad \udcff byte", "a", "what?")
    expected = ["prompt-not-unicode", "prompt-not-encodable"]
    assert codes_of(options, function=batches) == expected


def test_samples_start_from_the_end_of_document(tmp_path: Path) -> None:
    result = batches(parse("--load", tmp_path, "--num-samples", 3, "--micro-batch-size", 2))
    assert result == [[Prompt(None, [9])] * 2, [Prompt(None, [9])]]


def test_invalid_prompts_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse("--load", tmp_path, "--prompt", "a", "b", "--micro-batch-size", 1)

    with pytest.raises(SystemExit) as end:
        batches(options, lambda prompts: [f"{len(prompts)} prompts"])

    assert end.value.code == 2
    assert "2 prompts" in capsys.readouterr().err


def test_typed_prompts_continue_after_invalid_ones_until_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed_bytes = b"\xef\xbb\xbfa bb\nwhat?\nbad \xff byte\ntoo long\n\xe2\x80\xa8c cc\r\nstop\nd\n"
    (tmp_path / "typed").write_bytes(typed_bytes)
    options = parse("--load", tmp_path)

    def problems(prompts: list[Prompt]) -> list[str]:
        return ["it is too long"] if prompts[0].text == "too long" else []

    with open(tmp_path / "typed", encoding="utf-8") as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        result = batches(options, problems)

    assert [batch[0].text for batch in result] == ["a bb", "\u2028c cc"]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 3
    assert shown[0].endswith("no such word")
    assert shown[2] == "it is too long"


def test_an_interrupt_at_the_prompt_ends_the_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = MagicMock()
    typed.readline.side_effect = ["a\n", KeyboardInterrupt]
    monkeypatch.setattr(sys, "stdin", typed)
    assert batches(parse("--load", tmp_path)) == [[Prompt("a", [1])]]
    assert "stop" in capsys.readouterr().err


def write_output(options: Options, prompts: list[Prompt], texts: list[list[int]]) -> None:
    pairs = zip(prompts, texts, strict=True)
    results = (Continuation(prompt, ids, None) for prompt, ids in pairs)
    write_texts(options, Words(), results)


def test_texts_are_written_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    options = parse("--load", tmp_path, "--prompt", "a\nb", "--genfile", path, "--logprobs")
    assert options.scores_texts

    scored = Continuation(Prompt("a\nb", [1, 1]), [2, 9], [-0.5, -1.5, -2.5])
    sample = Continuation(Prompt(None, [9]), [3, 1], None)
    write_texts(options, Words(), [scored, sample])

    assert path.read_text("utf-8") == (
        '{"prompt": "a\\nb", "text": "éxx", "length": 2, "finished": true, '
        '"tokens": [1, 1, 2, 9], "logprobs": [-0.5, -1.5, -2.5]}\n'
        '{"text": "éxxx x", "length": 2, "finished": false}\n'
    )


@pytest.mark.parametrize(("flags", "names"), TABLES["flags_without_effect_are_warned_of"])
def test_flags_without_effect_are_warned_of(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    names: tuple[str, ...] | None,
) -> None:
    parse("--load", tmp_path, *flags)
    shown = capsys.readouterr().err
    assert printed_codes(shown) == ([] if names is None else ["no-effect"])
    assert all(f"--{name.replace('_', '-')}" in shown for name in names or ())


def test_output_must_not_replace_the_prompts(
    tmp_path: Path, codes_of: Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): the output of text generation never replaces the prompts' file, and an
    interruption loses no text"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("a\n")
    (tmp_path / "in.out").symlink_to("in")
    given = ("--load", ".", "--sample-input-file", tmp_path / "in")
    for output in ((), ("--sample-output-file", "./in"), ("--genfile", "in.out")):
        assert codes_of(*given, *output) == ["output-is-prompt-file"]
    parse(*given, "--genfile", "other")


def test_an_interrupted_output_leaves_the_file_and_keeps_the_texts(tmp_path: Path) -> None:
    """Claim (serving): the output of text generation never replaces the prompts' file, and an
    interruption loses no text"""
    path = tmp_path / "out"
    path.write_text("of an earlier run")
    options = parse("--load", tmp_path, "--num-samples", 2, "--sample-output-file", path)

    def results() -> Iterator[Continuation]:
        yield Continuation(Prompt(None, [9]), [1], None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        write_texts(options, Words(), results())
    partial = tmp_path / "out.partial"
    assert str(partial) in caught.value.__notes__[0]
    assert path.read_text() == "of an earlier run"
    assert partial.read_text() == "Sample 1: éx\n\n"
    write_texts(options, Words(), ())
    assert path.read_text() == ""
    assert not partial.exists()


def test_special_files_are_written_directly(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    options = parse("--load", tmp_path, "--num-samples", 1, "--sample-output-file", path)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(path.read_text)
        write_output(options, [Prompt(None, [9])], [[1]])
        assert received.result(10) == "Sample 1: éx\n\n"
    assert os.listdir(tmp_path) == ["pipe"]
    assert path.is_fifo()
