"""Fill in the middle: texts are kept, rates are met, and a sample is a function of its position."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.fill_in_middle import FillInMiddle, fim_problems
from megatron_ds.data.sample import Mark, Samples
from megatron_ds.data.token_dataset import SampleReading, TokenDataset, TransformedDataset
from megatron_ds.tokenizer import Tokenizer
from megatron_ds.tokenizer.huggingface import build_hf_tokenizer
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import codes
from tests.unit.tokenizer.test_golden import FOLDER, tokenizer_of

TOKENS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<file>")
TEXTS = ("The quick brown fox", "jumps over the lazy dog \U0001f642", "na\u00efve caf\u00e9")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of the golden files, with the tokens."""
    content = json.loads((FOLDER / "tokenizer.json").read_text("utf-8"))
    ids = [*content["model"]["vocab"].values(), *(item["id"] for item in content["added_tokens"])]
    settings = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": index, "content": token, **settings, "special": True}
        for index, token in enumerate(TOKENS, max(ids) + 1)
    ]
    file = tmp_path_factory.mktemp("fim") / "tokenizer.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return build_hf_tokenizer(str(file), trust_remote_code=False)


class Documents(TokenDataset):
    """Equal samples of documents, and of end-of-document tokens."""

    vocab_size = None
    cache = None

    def __init__(self, tokenizer: Tokenizer, texts: tuple[str, ...] = TEXTS) -> None:
        ids = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.eod)]
        self.seq_length = len(ids) + 40  # room for further tokens
        self.row = np.array([*ids, *[tokenizer.eod] * 41], dtype=np.int32)

    def __len__(self) -> int:
        return 300

    def __getitem__(self, position: int) -> Any:
        return self.row.copy()

    def read_into(self, position: int, ids: Any, marks: Any = None) -> None:
        ids[:] = self.row

    def sample_id(self, position: int) -> str:
        return str(position)


def documents_of(tokenizer: Tokenizer, ids: list[int]) -> list[list[int]]:
    groups = itertools.groupby(ids, tokenizer.eod.__eq__)
    return [list(ids) for is_end, ids in groups if not is_end]


def restored(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, str]:
    """The text of a document before it was transformed, and the order of its parts."""
    prefix, suffix, middle, *_ = (tokenizer.token_id(token) for token in TOKENS)
    if prefix not in ids:
        return tokenizer.decode(ids), "none"
    first = ids.index(suffix)
    last = ids.index(middle)
    assert ids[0] == prefix
    parts = ids[1:first], ids[first + 1 : last], ids[last + 1 :]
    before, after, end = map(tokenizer.decode, parts)
    return (end + after, "spm") if first == 1 and not before else (before + end + after, "psm")


def test_documents_keep_their_text_and_the_rates_are_met(tokenizer: Tokenizer) -> None:
    """Claim (samples): fill in the middle (`--fim-data`) keeps the text of every document, meets
    its rates, and is a function of seed, split and position"""
    options = DataConfig(fim_data=True, fim_rate=0.75, fim_spm_rate=0.25)

    def dataset(split: int) -> TransformedDataset:
        transform = FillInMiddle(options, tokenizer, (1, split))
        return TransformedDataset(Documents(tokenizer), [transform])

    data = dataset(0)
    orders = dict.fromkeys(("none", "spm", "psm"), 0)
    divisions = set()
    for position in range(300):
        documents = documents_of(tokenizer, data[position].tolist())
        texts = [restored(tokenizer, document) for document in documents]
        assert tuple(text for text, _ in texts) == TEXTS
        divisions.add(tuple(documents[0]))
        for _, order in texts:
            orders[order] += 1
    assert orders["none"] == pytest.approx(225, abs=45)
    assert orders["psm"] == pytest.approx(506, abs=60)
    assert len(divisions) > 80
    # Another reader, in another order; and another split.
    samples = SampleReading(dataset(0), [7, 3]).finish()
    assert samples.ids.tolist() == [data[7].tolist(), data[3].tolist()]
    assert dataset(1)[7].tolist() != data[7].tolist()


def transformed(transform: FillInMiddle, row: Any) -> tuple[list[int], list[bool]]:
    """A transformed sample, and which of its tokens have a loss as labels."""
    samples = Samples(row[None].copy(), np.full((1, len(row)), Mark.LAST, dtype=np.uint8))
    transform([0], samples)
    ids, marks = samples.at(0)
    assert marks is not None
    assert {*marks.tolist()} <= {0, Mark.NO_LOSS}  # ends of documents have moved
    return ids.tolist(), (marks == 0).tolist()


def test_samples_keep_their_length_and_padding_has_no_loss(tokenizer: Tokenizer) -> None:
    always = FillInMiddle(DataConfig(fim_data=True, fim_rate=1.0), tokenizer, (1, 0))
    row = Documents(tokenizer).row
    longer, has_loss = transformed(always, row[:20])
    assert len(longer) == 20
    assert all(has_loss)
    # Encoded again, letters become words, of fewer tokens.
    letters = [token for letter in "The " * 20 for token in tokenizer.encode(letter)]
    shorter, has_loss = transformed(always, np.array(letters, dtype=np.int32))
    assert len(shorter) == len(letters)
    pad = tokenizer.token_id("<fim_pad>")
    assert shorter[-1] == pad
    assert has_loss == [token != pad for token in shorter]
    never = FillInMiddle(DataConfig(fim_data=True, fim_rate=0.0), tokenizer, (1, 0))
    assert transformed(never, row)[0] == row.tolist()


def test_fragments_are_transformed_at_a_rate_of_their_own(tokenizer: Tokenizer) -> None:
    values: Any = {"fim_split_sample": "<file>", "fim_fragment_rate": 1.0, "fim_no_prefix": "!"}
    options = DataConfig(fim_data=True, fim_rate=1.0, **values)
    row = Documents(tokenizer, ("one file<file>two files<file>!three", "without")).row
    ids, _ = transformed(FillInMiddle(options, tokenizer, (1, 0)), row)
    document, other = documents_of(tokenizer, ids)
    groups = itertools.groupby(document, lambda token: token == tokenizer.token_id("<file>"))
    texts = [restored(tokenizer, list(part)) for is_split, part in groups if not is_split]
    assert [text for text, _ in texts] == ["one file", "two files", "!three"]
    assert [order == "none" for _, order in texts] == [False, False, True]
    assert restored(tokenizer, other)[0] == "without"


def test_tokens_that_the_tokenizer_lacks_are_named(tokenizer: Tokenizer) -> None:
    options = DataConfig(fim_data=True)
    assert list(fim_problems(options, tokenizer)) == []
    assert list(fim_problems(DataConfig(), NullTokenizer(9))) == []
    assert codes(fim_problems(options, NullTokenizer(9))) == ["fim-needs-text"]
    for kind in ("GPT2BPETokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"):
        lacking = tokenizer_of(kind)
        assert codes(fim_problems(options, lacking)) == ["fim-token-missing"] * 4
        end = {"GPT2BPETokenizer": "<|endoftext|>", "SentencePieceTokenizer": "<EOD>"}
        assert lacking.token_id(end.get(kind, "</s>")) == lacking.eod
    named = DataConfig(fim_data=True, fim_eod_token="<fim_end>", fim_split_sample="<file>")
    (problem,) = fim_problems(named, tokenizer)
    assert problem.fields == ("fim_eod_token",)
    assert "<fim_end>" in problem.render()
