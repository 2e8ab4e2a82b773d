"""Chat templates in a process with limits, by stand-ins for the function that renders."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ds.inference.serving import template_process
from megatron_ds.inference.serving.template_process import TemplateLimits, TemplateProcess
from megatron_ds.tokenizer.chat_template import ChatTemplate
from tests.problems import raises_problem

LIMITS = TemplateLimits(seconds=0.3, memory=2**27)
RENDERER = "tests.unit.inference.stand_ins:render"
EXCEEDING = {
    "hold the lock and wait": "took longer",
    "hold the lock and compute": "took longer",
    "allocate": "memory",
    "exit": "status 3",
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel limits the processor's time; this program ends what only waits, in most tests
    never."""
    monkeypatch.setattr(template_process, "WAIT_FACTOR", 600.0)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(ChatTemplate("T", {}), LIMITS, RENDERER)
    yield process
    process.close()


def render(process: TemplateProcess, content: str) -> str:
    return process.render([{"role": "user", "content": content}])


def pid_of(process: TemplateProcess) -> int:
    return int(render(process, "x").split()[1])


@pytest.mark.parametrize("content", EXCEEDING)
def test_a_conversation_that_exceeds_a_limit_costs_no_other_one(
    process: TemplateProcess, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): a chat template that computes for long, holds the interpreter's lock or
    fills the memory is stopped, and the next conversation is rendered"""
    pid = pid_of(process)
    assert pid_of(process) == pid != os.getpid()
    with monkeypatch.context() as patch:
        if content.endswith("wait"):
            patch.setattr(template_process, "WAIT_FACTOR", 2.0)
        with raises_problem(
            "chat-template-exceeds-limits", "messages", contains=EXCEEDING[content]
        ):
            render(process, content)
    assert render(process, "é\n\ud83d\ude00").endswith(" é\n😀")
    assert pid_of(process) != pid


def test_the_program_runs_while_a_template_holds_its_lock(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_of(process)
    monkeypatch.setattr(template_process, "WAIT_FACTOR", 2.0)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(render, process, "hold the lock and wait")
        ticks = 0
        while not held.done():
            ticks += 1
            time.sleep(0.01)
        with raises_problem("chat-template-exceeds-limits"):
            held.result()
    assert ticks > 10


def test_texts_and_errors_have_a_maximal_length(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(render(process, "write")) == 2**20
    with raises_problem("chat-template-failed", "messages", contains="no such role") as raised:
        render(process, "reject")
    assert len(str(raised.problem)) < 2 * template_process.MAX_ERROR_CHARS


def test_a_process_that_is_lost_is_replaced(process: TemplateProcess) -> None:
    pid = pid_of(process)
    os.kill(pid, signal.SIGKILL)
    process._process.wait()
    assert pid_of(process) != pid


def test_threads_take_turns(process: TemplateProcess) -> None:
    contents = [str(number) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda content: render(process, content), contents))
    assert [text.split()[2] for text in texts] == contents
    assert threading.active_count() < 40


def test_a_probe_shows_what_a_template_does() -> None:
    counting = "{% for each in range(99999) %}{% for each in range(50) %}{% endfor %}{% endfor %}"
    sources = {
        counting: "chat-template-exceeds-limits",
        "{{ messages[0].content }}": None,
        "{{ raise_exception('a system message is needed') }}": "chat-template-failed",
    }
    processes = {
        source: TemplateProcess(ChatTemplate(source, {}), TemplateLimits(0.1 if code else 30.0))
        for source, code in sources.items()
    }  # which start at the same time
    with raises_problem("chat-template-exceeds-limits", contains="0.1 s"):
        processes.pop(counting).warning()
    for source, process in processes.items():
        error = process.warning()
        assert (error and error.problems[0].code) == sources[source]
        process.close()


def test_a_missing_library_is_named() -> None:
    process = TemplateProcess(ChatTemplate("T", {}), LIMITS, "no_such_library:render")
    for _ in range(2):
        with raises_problem("library-missing", contains="transformers"):
            render(process, "x")
    process.close()
