"""Text of tokens that arrive one at a time."""

from __future__ import annotations

import random

import pytest

from megatron_ds.inference.generation.stop_rules import StopStrings
from megatron_ds.inference.generation.token_text import TokenText
from megatron_ds.tokenizer import Tokenizer
from tests.unit.inference.schedulers import PARTS, ByteTokenizer
from tests.unit.tokenizer.test_golden import FILES, texts, tokenizer_of


def parts_of(text: TokenText, ids: list[int]) -> list[str]:
    return [*(text.add(each) for each in ids), text.finish()]


def ids_of(tokenizer: Tokenizer | ByteTokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text))


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = ByteTokenizer()
    parts = parts_of(TokenText(tokenizer.decode), ids_of(tokenizer, "Aé😀B"))
    assert parts == ["A", "", "é", "", "", "", "😀", "B", ""]


def test_incomplete_characters_appear_at_the_end() -> None:
    tokenizer = ByteTokenizer()
    ids = ids_of(tokenizer, "A€")[:-1]
    *parts, last = parts_of(TokenText(tokenizer.decode), ids)
    assert parts == ["A", "", ""]
    assert "".join(parts) + last == tokenizer.decode(ids)


def test_invalid_bytes_are_not_held_back_for_ever() -> None:
    tokenizer = ByteTokenizer()
    broken = ids_of(tokenizer, "€")[1:] * 2
    ids = [*broken, *ids_of(tokenizer, "AB")]
    parts = parts_of(TokenText(tokenizer.decode), ids)
    assert parts[-3:] == [tokenizer.decode([*broken, ids[-2]]), "B", ""]


@pytest.mark.parametrize("kind", FILES)
def test_parts_continue_the_text_of_any_tokenizer(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in ["1 2 3 4"] if kind == "NullTokenizer" else texts():
        ids = ids_of(tokenizer, text)
        for length in range(1, len(ids), 7):
            before = tokenizer.decode(ids[:length])
            if before.endswith("\ufffd"):
                continue
            new = parts_of(TokenText(tokenizer.decode, prompt=ids[:length]), ids[length:])
            assert before + "".join(new) == tokenizer.decode(ids)


def test_a_prompt_that_ends_within_a_character_is_left_out() -> None:
    tokenizer = ByteTokenizer()
    first, *rest = ids_of(tokenizer, "éA")
    text = TokenText(tokenizer.decode, prompt=[first])
    assert "".join(parts_of(text, rest)) == tokenizer.decode(rest) == "\ufffdA"


@pytest.mark.parametrize(
    ("given", "stops", "expected"),
    [
        ("ABCD", ["C"], ["A", "B", "", "", ""]),
        ("ABCD", ["BC"], ["A", "", "", "", ""]),
        ("ABCD", ["CX"], ["A", "B", "", "CD", ""]),
        ("AABC", ["AB"], ["", "A", "", "", ""]),
        ("AABA", ["AABC"], ["", "", "", "AAB", "A"]),
        ("ABCD", ["D", "BC"], ["A", "", "", "", ""]),
        ("ABCD", ["BCD", "C"], ["A", "", "B", "", ""]),
        ("ABC", ["AB", "A"], ["", "", "", ""]),
        ("A€B", ["€"], ["A", "", "", "", "", ""]),
    ],
)
def test_a_stop_string_ends_the_text(
    given: str, stops: tuple[str, ...], expected: list[str]
) -> None:
    tokenizer = ByteTokenizer()
    assert parts_of(TokenText(tokenizer.decode, stops), ids_of(tokenizer, given)) == expected


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_end_random_texts_where_the_whole_text_has_them(seed: int) -> None:
    """The text is that before the first stop string to be complete."""
    draw = random.Random(seed)
    tokenizer = ByteTokenizer()
    few = ids_of(tokenizer, "ABé€😀") + [PARTS.index(part) for part in (b"ab", "é".encode())]
    ids = [draw.choice(few) for _ in range(40)]
    stops = tuple("".join(draw.choices("ABabé€", k=draw.randint(1, 3))) for _ in range(2))
    strings = StopStrings(tokenizer.decode, stops)

    end = next((size for size in range(1, 41) if strings(ids[:size])), 40)

    whole = tokenizer.decode(ids[:end])
    parts = parts_of(TokenText(tokenizer.decode, stops), ids[:end])
    first = min((whole.find(stop) for stop in stops if stop in whole), default=None)
    assert "".join(parts) == whole[:first]
    assert not any(stop in "".join(parts) for stop in stops)
    before = tokenizer.decode(ids[: end - 1])
    assert not any(stop in before for stop in stops)
    assert end == 40 or any(stop in whole for stop in stops)


@pytest.mark.parametrize(
    ("text", "expected"), [("ABC", True), ("ABCD" * 9, False), ("D" * 50 + "ABC", True)]
)
def test_only_the_last_tokens_complete_a_stop_string(text: str, expected: bool) -> None:
    tokenizer = ByteTokenizer()
    decoded: list[int] = []

    def decode(ids: object) -> str:
        assert isinstance(ids, list)
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    strings = StopStrings(decode, ("ABC",) if expected else ("BDA", "X"))
    assert strings(ids_of(tokenizer, text)) == expected
    assert max(decoded) <= 16  # a step of a long text takes no longer
