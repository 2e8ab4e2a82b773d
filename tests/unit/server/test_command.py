"""The command line of the server: options and problems, without a checkpoint."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from megatron_ds import cli
from megatron_ds.inference.serving import template_process
from megatron_ds.inference.serving.api_schema import Defaults
from megatron_ds.inference.serving.template_process import TemplateLimits
from megatron_ds.server import command
from megatron_ds.server.model_facts import loss_of_run
from megatron_ds.server.options import Options
from tests.problems import printed_codes, raises_problem


def parse(*arguments: object) -> Options:
    return cli.parse(Options, [str(argument) for argument in arguments])


def test_defaults_are_megatrons_on_loopback(tmp_path: Path) -> None:
    options = parse("--load", tmp_path)

    assert (options.host, options.port) == ("127.0.0.1", 5000)
    assert options.defaults == Defaults(1.0, 0, 0.0, 64)
    assert options.checkpoint.precision is None


def test_megatron_command_line_is_accepted(tmp_path: Path) -> None:
    line = (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 "
        "--hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 1024 "
        "--tokenizer-type GPT2BPETokenizer --fp16 --micro-batch-size 1 --seq-length 1024 "
        "--out-seq-length 1024 --temperature 1.0 --vocab-file V --merge-file M --top_p 0.9 "
        "--seed 42 --port 5001"
    )
    options = parse("--load", tmp_path, *line.split())

    assert options.defaults == Defaults(1.0, 0, 0.9, 1024, seed=42)
    assert options.port == 5001
    assert options.checkpoint.precision == "fp16"
    assert options.given_in("tokenizer")["vocab_file"] == "V"
    assert options.given_in("model")["hidden_size"] == 1024


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("max-model-len", "--inference-max-seq-length"),
        ("gpu-memory-utilization", "--inference-max-requests"),
        ("dtype", "type is that of the training run"),
        ("tensor-parallel-size", "--tensor-model-parallel-size?"),
    ],
)
def test_flags_of_other_servers_have_advice(
    flag: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--load", tmp_path, f"--{flag}", "1")
    assert advice in " ".join(capsys.readouterr().err.split())


def test_the_folder_needs_no_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(tmp_path, "--served-model-name", "a", "b", "--allowed-origins", "*")
    assert options.checkpoint.load == str(tmp_path)
    assert (options.served_model_name, options.allowed_origins) == (("a", "b"), ("*",))
    for arguments in (("--load", tmp_path, "--bf16", "x"), (tmp_path, "x"), ("\u2013load", "x")):
        with pytest.raises(SystemExit):
            parse(*arguments)
        assert "unexpected-argument" in printed_codes(capsys.readouterr().err)


def test_an_occupied_port_is_reported_before_the_checkpoint_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "open_checkpoint", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with raises_problem("server-address-unusable", "host", "port", contains=f" {port}: "):
            command.run(parse("--load", tmp_path, "--port", port))


def test_a_chat_template_that_takes_too_long_is_refused_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim (serving): a folder whose chat template exceeds its limits is refused"""
    file = tmp_path / "chat_template.jinja"
    assert command.start_template(None) is None
    assert command.start_template(tmp_path) is None
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "TemplateLimits", partial(TemplateLimits, 0.1))
        file.write_text(
            "{% for a in range(9999) %}{% for b in range(999) %}{% endfor %}{% endfor %}"
        )
        with raises_problem("chat-template-exceeds-limits"):
            command.start_template(tmp_path)
    file.write_text("{{ raise_exception('never') }}")
    process = command.start_template(tmp_path)
    assert process is not None
    process.close()
    assert printed_codes(capsys.readouterr().err) == ["chat-template-failed"]


def test_loss_curves_have_a_few_hundred_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loss_of_run(tmp_path, 9) is None
    metrics = tmp_path / "metrics.jsonl"
    records = [{"iteration": step, "lm_loss": float(step)} for step in range(1, 1001)]
    for group, loss in (("a", 3.0), ("b", 4.0), ("a", math.inf)):
        records.append({"iteration": 500, "group": group, "validation_loss": loss})
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    loss = loss_of_run(tmp_path, 998)
    assert loss is not None
    assert loss["validation"] == [(500, 3.0)]
    # Means of four from the end; two are left over.
    assert loss["train"][:2] == [(2, 1.5), (6, 4.5)]
    assert loss["train"][-1] == (998, 996.5)
    assert len(loss["train"]) == 250
    assert loss_of_run(tmp_path, 4) == {
        "train": [(step, float(step)) for step in range(1, 5)],
        "validation": [],
    }
    assert capsys.readouterr().err == ""
    metrics.write_text("no record\n")
    assert loss_of_run(tmp_path, 998) is None
    assert "metrics.jsonl, line 1: not a metrics record" in capsys.readouterr().err


def test_all_problems_are_reported_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = (
        "--temperature 0 --top_k 3 --top_p 2 --port 70000 --out-seq-length 0 --request-timeout 0 "
        "--allowed-origins https://a.example/ b.example http://localhost:3000 "
        "--tensor-model-parallel-size 2 --bf16 --fp16 --hots x --load /no/such"
    )
    with pytest.raises(SystemExit) as end:
        parse(*line.split())

    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert "--host?" in shown
    assert "fastapi and uvicorn and prometheus_client" in shown
    assert Counter(printed_codes(shown)) == {
        "unknown-flag": 1,
        "out-of-range": 5,
        "server-packages-missing": 1,
        "load-folder-missing": 1,
        "generation-needs-all-processes": 1,
        "several-precisions": 1,
        "top-k-and-top-p": 1,
        "origin-invalid": 2,
    }
