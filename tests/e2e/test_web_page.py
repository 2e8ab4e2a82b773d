"""The page of the text generation server in a browser."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.runs import DEADLINE, REPOSITORY, Launcher, Run, Settings, free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

SERVER = REPOSITORY / "tools" / "run_text_generation_server.py"
PAGE = REPOSITORY / "megatron_ds" / "inference" / "serving" / "web_page.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 360, "height": 740}
KEY = "a key of the test"
CONTEXT = 20_000
"""Tokens, which take far longer than the test."""
SITE = "http://page.test/"
"""Where the page is without a server."""
INFO = {
    "name": "<b>", "checkpoint": "step 4", "parameters": 1200, "num_layers": 3, "hidden_size": 8,
    "num_attention_heads": 4, "num_query_groups": 2, "num_experts": 1, "max_length": 64,
    "defaults": {"temperature": 0.5, "top_k": 3, "top_p": 0.0, "tokens_to_generate": 64, "seed": 7},
    "loss": None, "chat": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found or importlib.util.find_spec("playwright") is None:
        pytest.skip("needs Chromium (on Debian: apt install chromium) and playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library, library.chromium.launch(executable_path=found[0]) as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab, in which no script may fail."""
    errors: list[object] = []
    with browser.new_context(viewport=PHONE, reduced_motion="reduce") as context:
        context.set_default_timeout(1000 * DEADLINE)
        tab = context.new_page()
        tab.on("pageerror", lambda error: errors.append(error))
        yield tab
    assert errors == []


@dataclass(frozen=True)
class Served:
    """A running server of a trained model."""

    run: Run
    url: str
    folder: Path

    def call(self, path: str, fields: dict[str, Any] | None = None) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        headers = {"Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            return json.load(response)


@pytest.fixture
def served(
    browser: Browser, launcher: Launcher, base: Settings, tmp_path: Path
) -> Iterator[Served]:
    folder = tmp_path / "run"
    port = free_port()
    rope = {"position_embedding_type": "rope", "train_iters": 2, "global_batch_size": 4}
    evaluation = {"eval_interval": 1, "eval_iters": 1}
    launcher.start({**base, **rope, **evaluation, "save": folder}).succeed()
    (tmp_path / "keys").write_text(KEY)
    settings = {"load": folder, "port": port, "api_key_file": tmp_path / "keys"}
    limits = {"inference_max_seq_length": CONTEXT, "inference_max_requests": 2}
    run = launcher.start({**settings, **limits}, script=SERVER)
    run.wait_until(lambda: "serving on" in run.output)
    yield Served(run, f"http://127.0.0.1:{port}/", folder)
    os.kill(run.pids[0], signal.SIGTERM)
    run.succeed()


def shown_details(page: Page) -> tuple[float, dict[str, str]]:
    """Of the token whose details are shown: log-probability; probabilities of alternatives."""
    box = page.locator("#details")
    logprob = box.locator(".logprob").inner_text().removeprefix("log-probability ")
    names, values = (box.locator(f"tr {part}") for part in ("th", "td:last-child"))
    shares = dict(zip(names.all_text_contents(), values.all_text_contents(), strict=True))
    return float(logprob), shares


def assert_fits(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def assert_model_is_shown(page: Page, served: Served) -> None:
    page.locator("dl").wait_for(state="attached")
    texts = page.locator("dl > *").all_text_contents()
    facts = dict(zip(texts[::2], texts[1::2], strict=True))
    info = served.call("info")
    assert facts == {
        "Name": served.folder.name, "Checkpoint": "step 2", "Layers": "2", "Hidden size": "32",
        "Attention heads": "4", "Parameters": f"{info['parameters']:,}",
        "Context": f"{CONTEXT} tokens",
    }  # fmt: skip
    lines = (served.folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for curve, key in (("train", "lm_loss"), ("validation", "validation_loss")):
        losses = [[each["iteration"], each[key]] for each in records if key in each]
        assert len(losses) == 2
        assert info["loss"][curve] == losses
        points = page.locator(f"polyline.{curve}").get_attribute("points")
        assert points is not None
        assert len(points.split()) == 2


def assert_details_are_those_of_the_api(page: Page, served: Served) -> None:
    """Of a greedy text of six tokens after `1 2 3`, which is the only one on the page."""
    fields = {"prompt": "1 2 3", "max_tokens": 6, "temperature": 0, "logprobs": 5}
    choice = served.call("v1/completions", fields)["choices"][0]
    tokens = page.locator(".token")
    logprobs = choice["logprobs"]
    assert "".join(tokens.all_text_contents()) == choice["text"]

    def check(place: int) -> None:
        logprob, shares = shown_details(page)
        top = logprobs["top_logprobs"][place]
        assert logprob == pytest.approx(logprobs["token_logprobs"][place], abs=1e-3)
        assert list(shares) == sorted(top, key=top.get, reverse=True)
        for token, share in shares.items():
            expected = 100 * math.exp(top[token])
            assert float(share.removesuffix(" %")) == pytest.approx(expected, abs=0.02)
        assert_fits(page)

    for _ in range(12):
        page.keyboard.press("Tab")
        if page.locator(".token:focus").count():
            break
    check(0)
    for key, place in (("ArrowRight", 1), ("End", 5), ("ArrowLeft", 4)):
        page.keyboard.press(key)
        check(place)
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    tokens.nth(3).hover()
    check(3)


def test_texts_arrive_token_by_token(page: Page, served: Served) -> None:
    """Claim (serving): in a browser, tokens appear while a text is generated, with the
    probabilities of the API, and Stop frees the server"""
    page.goto(served.url)
    for key, problem in (("wrong", "needs a key"), (KEY, "does not accept this key")):
        page.locator("#error", has_text=problem).wait_for()
        page.keyboard.type(key)
        page.keyboard.press("Enter")
    assert_model_is_shown(page, served)

    page.locator("#greedy").check()
    page.locator("#max_tokens").fill("6")
    page.locator("#prompt").focus()
    page.keyboard.type("1 2 3")
    page.keyboard.press("Control+Enter")
    page.locator("article[aria-busy=false]").wait_for()
    assert_details_are_those_of_the_api(page, served)

    # A text that takes minutes arrives while it is generated, and can be stopped.
    page.locator("#max_tokens").fill(str(CONTEXT - 9))
    page.locator("#generate").focus()
    page.keyboard.press("Enter")
    arriving = page.locator("article[aria-busy=true] .token")
    arriving.nth(5).wait_for()
    arriving.nth(arriving.count() + 5).wait_for()
    assert served.call("health")["requests"] == 1
    page.keyboard.press("Enter")  # on Stop, which has the focus now
    page.locator("footer", has_text="stopped after").wait_for()
    served.run.wait_until(lambda: served.call("health")["requests"] == 0)
    assert arriving.count() == 0

    page.locator("#greedy").uncheck()
    page.locator("#temperature").fill("500")
    page.locator("#generate").click()
    message = "Temperature must be a number from 0 to 100, not 500"
    page.locator("#error", has_text=message).wait_for()
    assert page.locator("#temperature:focus[aria-invalid=true]").count() == 1
    assert page.locator("article").count() == 2


class Site:
    """The page without a server: what is sent to one, and prepared responses."""

    def __init__(self, page: Page, info: dict[str, Any] = INFO) -> None:
        self.sent: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.respond: Callable[[Route], None] = lambda route: route.abort()
        html = PAGE.read_text(encoding="utf-8")
        page.route(SITE, lambda route: route.fulfill(body=html, content_type="text/html"))
        page.route(f"{SITE}info", lambda route: route.fulfill(json=info))
        page.route(f"{SITE}v1/**", self._record)
        page.goto(SITE)
        page.locator("dl").wait_for(state="attached")

    def stream(self, *events: dict[str, Any], end: str = "data: [DONE]\n\n") -> None:
        """Responds with events from now on."""
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
        self.respond = lambda route: route.fulfill(body=body, content_type="text/event-stream")

    def _record(self, route: Route) -> None:
        self.sent.append(route.request.post_data_json)
        self.paths.append(route.request.url.removeprefix(SITE))
        self.respond(route)


def event_of(text: str, *tokens: str) -> dict[str, Any]:
    """An event as the server sends it; each token has an alternative."""
    logprobs = {
        "tokens": list(tokens),
        "token_logprobs": [-1.0 - place for place in range(len(tokens))],
        "top_logprobs": [{token: -1.0, "<i>other</i>": -2.0} for token in tokens],
    }
    return {"choices": [{"index": 0, "text": text, "logprobs": logprobs}]}


def test_texts_are_shown_as_they_are(page: Page) -> None:
    """Claim (serving): the page shows texts of users and models as they are, never as HTML"""
    site = Site(page)
    site.stream(
        event_of("😀", "\ufffd", "\ufffd"),  # two tokens of one character
        event_of("<b>x</b>", "<b>x</b>"),
        event_of(" a b", " a", " b"),
        event_of("\n", "\n"),
        event_of("", "<|end|>"),
        event_of(""),
    )
    page.locator("#prompt").fill("<u>" + "w" * 400)
    page.keyboard.press("Control+Enter")
    page.locator("article[aria-busy=false]").wait_for()

    shown = page.locator(".token")
    assert shown.all_text_contents() == ["😀", "<b>x</b>", " a", " b", "\n", ""]
    marks = [each.get_attribute("data-mark") for each in shown.all()]
    assert marks == [None, None, None, None, "↵", "<|end|>"]
    shown.nth(1).click()
    assert page.locator("#details th").all_text_contents() == ["<b>x</b>", "<i>other</i>"]
    shown.nth(0).click()
    assert page.locator("#details table").count() == 2
    assert page.locator("b, u, #details i > *").count() == 0
    assert page.locator("h1").inner_text() == "<b>"
    assert_fits(page)
    settings = {"temperature": 0.5, "top_p": 1, "top_k": 3, "max_tokens": 32, "seed": 7}
    request = {"prompt": "<u>" + "w" * 400, "stream": True, "logprobs": 5}
    assert site.sent == [{**request, **settings}]

    page.get_by_role("button", name="Continue").click()
    page.locator("article[aria-busy=false]").nth(1).wait_for()
    assert site.sent[1] == {**site.sent[0], "prompt": f"{request['prompt']}😀<b>x</b> a b\n"}
    assert page.locator(".prompt").first.inner_text().startswith("<u>w")
    page.get_by_role("button", name="Edit").first.click()
    assert page.locator("#prompt:focus").input_value().endswith("b\n😀<b>x</b> a b\n")

    page.locator("#seed").fill("1")
    page.get_by_role("button", name="Use this seed").first.click()
    assert page.locator("#seed").input_value() == "7"

    # What is announced is the text, not its tokens one by one.
    page.locator("#live", has_text="😀<b>x</b> a b").wait_for(state="attached")
    assert page.locator("#live").inner_text().endswith(". 7 tokens.")


def part_of(content: str, *tokens: str) -> dict[str, Any]:
    """The event of a chat with a text; each token has an alternative."""
    others = [{"token": token, "logprob": -1.0} for token in (*tokens[:1], "other")]
    entries = [{"token": token, "logprob": -1.0, "top_logprobs": others} for token in tokens]
    return {"choices": [{"delta": {"content": content}, "logprobs": {"content": entries}}]}


def test_messages_are_answered(page: Page) -> None:
    """Claim (serving): the page chats with a model whose tokenizer has a chat template"""
    site = Site(page, {**INFO, "chat": True})
    site.stream(part_of("Yes", "Yes"), part_of(" <b>", " <b>"), part_of(""))
    page.locator("#prompt").fill("Is it?")
    page.get_by_role("button", name="Send").click()
    page.locator("article[aria-busy=false]").wait_for()
    assert page.locator(".token").all_text_contents() == ["Yes", " <b>"]
    page.locator(".token").nth(0).click()
    assert page.locator("#details th").all_text_contents() == ["Yes", "other"]
    asked = {"role": "user", "content": "Is it?"}
    settings = {"temperature": 0.5, "top_p": 1, "top_k": 3, "max_tokens": 32, "seed": 7}
    wanted = {"messages": [asked], "stream": True, "logprobs": True, "top_logprobs": 5}
    assert site.sent == [{**wanted, **settings}]
    assert site.paths == ["v1/chat/completions"]

    page.keyboard.press("Escape")  # the details cover the button
    page.get_by_role("button", name="Reply").click()
    page.locator("#prompt").fill("Why?")
    page.keyboard.press("Control+Enter")
    page.locator("article[aria-busy=false]").nth(1).wait_for()
    answer = {"role": "assistant", "content": "Yes <b>"}
    assert site.sent[1]["messages"] == [asked, answer, {"role": "user", "content": "Why?"}]
    assert page.locator("article").first.locator(".message").count() == 3
    assert page.locator("b").count() == 0
    assert_fits(page)

    # Without it, texts are completed as ever.
    page.locator("#chat").uncheck()
    site.stream(event_of("x", "x"))
    page.get_by_role("button", name="Generate").click()
    page.locator("article[aria-busy=false]").nth(2).wait_for()
    assert site.sent[2]["prompt"] == "Why?"
    assert site.paths[2] == "v1/completions"


def test_failures_are_shown(page: Page) -> None:
    site = Site(page)

    def generate_and_fail(message: str, texts: int) -> None:
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        page.locator("#error", has_text=message).wait_for()
        assert page.locator("#generate").is_enabled()
        assert page.locator("article").count() == texts
        page.evaluate("document.getElementById('error').textContent = ''")

    generate_and_fail("The connection to the server failed.", 0)
    for status in (400, 429, 503, 504):
        reply = {"error": {"message": f"it is {status}"}}
        site.respond = lambda route, status=status, reply=reply: route.fulfill(
            status=status, json=reply
        )
        generate_and_fail(f"It is {status}. (status {status})", 0)
    site.stream(event_of("x", "x"), {"error": {"message": "too late"}}, end="")
    generate_and_fail("Too late.", 1)
    assert "failed after 1 token " in page.locator("footer").inner_text()
    site.stream(event_of("x", "x"), end="")
    generate_and_fail("The connection to the server failed.", 2)
