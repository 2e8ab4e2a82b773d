"""Stages that process single documents: changes, drops and invalid settings."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import ftfy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ds.cleaning import text_filters
from megatron_ds.cleaning.stages import Document, Dropped, Replaced
from megatron_ds.cleaning.text_filters import FixUnicode, LanguageFilter, LengthFilter
from megatron_ds.cleaning.url_filter import UrlFilter
from megatron_ds.config.problems import UserError
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import codes
from tests.tables import tables

TABLES = tables(__file__)

ENGLISH = "The committee will meet on Thursday to talk about the new bridge over the river. "
GERMAN = "Der Ausschuss tritt am Donnerstag zusammen, um über die neue Brücke zu beraten. "


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the model once for all tests."""
    monkeypatch.setattr(text_filters, "_identifier", model)


model = functools.cache(text_filters._identifier)


def document(text: str, url: str | None = None) -> Document:
    return Document(text, url)


BROKEN = [
    "a",
    "<b>",
    "&amp;",
    "&eacute;",
    "\n",
    "\r\n",
    "\r",
    "ﬁ",
    "schÃ¶n",
    "“x”",
    "\x1b[36m",
    "\x00",
    "\x7f",
    "\x85",
    "e\u0301",
    "ＬＯＵＤ",
    "\u2028",
    "\ufeff",
    " ",
    "âœ”",
    "Ã",
]


@given(st.lists(st.sampled_from(BROKEN) | st.text(max_size=3), max_size=12).map("".join))
@settings(max_examples=60, deadline=None)
@example("schÃ¶n")
@example("<b>\n&amp;")
@example("plain\n\ttext, 100% of it")
def test_repaired_unicode_equals_ftfy(text: str) -> None:
    fixed = ftfy.fix_text(text)
    assert FixUnicode()(document(text)) == (None if fixed == text else Replaced(fixed))


def test_documents_of_other_languages_are_dropped() -> None:
    english = LanguageFilter(["en"], 0.5)
    both = LanguageFilter(["en", "de"], 0.5)
    assert english(document(ENGLISH * 3)) is None
    assert english(document(GERMAN * 3)) == Dropped("language de")
    assert both(document(GERMAN * 3)) is None
    assert both(document(" 12:30 -- 14:00 ")) == Dropped("no letters")
    # A long text is sampled at three positions.
    assert english(document(ENGLISH * 10 + GERMAN * 1000 + ENGLISH)) == Dropped("language de")


def test_documents_of_uncertain_language_are_dropped() -> None:
    assert LanguageFilter(["en"], 1.0)(document("bar")) is not None
    assert LanguageFilter(["en"], 0.0)(document(ENGLISH)) is None
    outcome = LanguageFilter(["en"], 1.0)(document(ENGLISH[:40]))
    assert outcome in (None, Dropped("uncertain language"))


def test_unknown_languages_are_errors() -> None:
    with pytest.raises(UserError) as raised:
        LanguageFilter(["xx", "en", "klingon"], 0.5)
    first, second = raised.value.problems
    assert codes([first, second]) == ["language-not-supported"] * 2
    assert "--languages klingon: " in str(first)
    assert "--languages xx: " in str(second)


def test_short_texts_are_dropped() -> None:
    assert LengthFilter(0)(document(" \n ")) == Dropped("empty")
    assert LengthFilter(5)(document("  abcd  ")) == Dropped("fewer than 5 characters")
    assert LengthFilter(4)(document("  abcd  ")) is None
    assert LengthFilter(0, min_words=3)(document("a b ")) == Dropped("fewer than 3 words")
    assert LengthFilter(0, min_words=3)(document("a b c")) is None
    tokens = LengthFilter(0, min_tokens=3, tokenizer=NullTokenizer(100))
    assert tokens(document("1 2")) == Dropped("fewer than 3 tokens")
    assert tokens(document("1 2 3")) is None


LIST = TABLES["list_of_hosts"]


@pytest.mark.parametrize(("url", "reason"), TABLES["urls"])
def test_url_filter(tmp_path: Path, url: str, reason: str | None) -> None:
    path = tmp_path / "list.txt"
    path.write_text(LIST)
    assert UrlFilter([str(path)]).judge(url) == reason
    assert UrlFilter([str(path)])(document("", url)) == (reason and Dropped(reason))
    assert UrlFilter([str(path)])(document("")) is None


@pytest.mark.parametrize(
    "url", [f"http://{'a.' * 100_000}com/", f"http://a.b/{'.' * 200_000}"], ids=["host", "file"]
)
def test_time_for_a_long_address_is_linear(url: str) -> None:
    urls = UrlFilter([])
    start = time.process_time()
    urls.judge(url)
    assert time.process_time() - start < 1


def test_invalid_lines_of_all_lists_are_reported(tmp_path: Path) -> None:
    first = tmp_path / "1.txt"
    second = tmp_path / "2.txt"
    first.write_text("example.com\nhttp://x.org/\nregex:(\n")
    second.write_bytes(b"\xff\xfe")
    missing = tmp_path / "none"
    with pytest.raises(UserError) as raised:
        UrlFilter([str(first), str(second), str(missing)])
    problems = raised.value.problems
    assert codes(problems) == ["invalid-url-blacklist"] * 4
    for problem, place in zip(problems, (f"{first}:2", f"{first}:3", second, missing), strict=True):
        assert f"{place}: " in str(problem)
