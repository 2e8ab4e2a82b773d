"""tools/evaluate.py gives what transformers computes with the same weights, on any ranks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from tests.e2e.runs import REPOSITORY, Launcher

TOOL = REPOSITORY / "tools" / "evaluate.py"
TASKS = REPOSITORY / "tasks" / "main.py"
GOLDEN = REPOSITORY / "tests" / "golden" / "tokenizers"
LENGTH = 16
STRIDE = 5
SETTINGS = {
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_file": GOLDEN / "vocab.json",
    "merge_file": GOLDEN / "merges.txt",
    "overlapping_eval": STRIDE,
    "micro_batch_size": 3,
}
VOCAB = json.loads((GOLDEN / "vocab.json").read_text(encoding="utf-8"))
EOD = VOCAB["<|endoftext|>"]
TEXTS = [
    json.loads(line)["text"]
    for line in (GOLDEN / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
]
WIKITEXT = ' \n = Title ( here ) = \n \n He said " no " , 1 @,@ 000 times ; it \'s 5 @.@ 2 . \n'
PLAIN = '\n= Title (here) =\n\nHe said "no", 1,000 times; it\'s 5.2.\n'
CLOZE = ["the quick brown fox jumps and", "line one and line two and paragraphs\n"]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=len(VOCAB), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
        # Usually the most probable token.
        model.transformer.ln_f.bias += 2 * model.transformer.wte.weight[VOCAB["\u0120and"]]
    return model


@pytest.fixture(scope="module")
def weights(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("weights")
    model.save_pretrained(folder)
    return f"hf:{folder}"


TOKENIZER = tokenizers.ByteLevelBPETokenizer(str(GOLDEN / "vocab.json"), str(GOLDEN / "merges.txt"))


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    return logits.log_softmax(dim=-1)


def rolling_nats(model: Any, ids: Sequence[int]) -> float:
    """As Megatron's tasks: windows begin every STRIDE tokens, and score what is new in each."""
    nats = 0.0
    scored = 0
    for begin in range(0, len(ids), STRIDE):
        window = ids[begin : begin + LENGTH + 1]
        for index in range(1, len(window)):
            if begin + index > scored:
                nats -= float(logprobs(model, window[:-1])[index - 1, window[index]])
                scored = begin + index
    assert scored == len(ids) - 1
    return nats


def evaluate(
    launcher: Launcher,
    folder: Path,
    settings: dict[str, object],
    ranks: int = 1,
    script: Path = TOOL,
) -> dict[str, Any]:
    output = folder / "result.json"
    launcher.start({**SETTINGS, **settings, "output": output}, ranks=ranks, script=script).succeed()
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return result


@pytest.fixture(scope="module")
def corpus_nats(model: Any) -> float:
    """Of all texts of the corpus."""
    return sum(rolling_nats(model, [EOD, *encode(text)]) for text in TEXTS if text.strip())


def models_around(weights: str, folder: Path) -> list[Path]:
    """Two models whose mean is that of the weights."""
    paths = []
    for sign in (1, -1):
        changed = transformers.GPT2LMHeadModel.from_pretrained(weights.removeprefix("hf:"))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter += sign * 0.2 * torch.randn(parameter.shape, generator=generator)
        paths.append(folder / f"{sign}")
        changed.save_pretrained(paths[-1])
    return paths


@pytest.mark.parametrize(("ranks", "tp_size"), [(1, None), (2, 1), (2, 2)])
def test_perplexity_is_that_of_transformers(
    corpus_nats: float,
    weights: str,
    launcher: Launcher,
    tmp_path: Path,
    ranks: int,
    tp_size: int | None,
) -> None:
    """Claim (serving): perplexity in overlapping windows, bits per byte and perplexity per word
    equal an independent computation with transformers, on one process, two copies and two shards

    The two shards are of the mean of two models.

    Claim (conversion): a mean of checkpoints is evaluated without writing it
    """
    settings: dict[str, object] = {"load": weights, "valid_data": GOLDEN / "corpus.jsonl"}
    if tp_size is not None:
        settings["tensor_model_parallel_size"] = tp_size
    if tp_size == 2:
        settings["load"], settings["merge_with"] = models_around(weights, tmp_path)
    result = evaluate(launcher, tmp_path, settings, ranks)

    texts = [text for text in TEXTS if text.strip()]
    tokens = sum(len(encode(text)) for text in texts)
    size = sum(len(t.encode()) for t in texts)
    nats = corpus_nats
    assert (result["documents"], result["tokens"], result["bytes"]) == (len(texts), tokens, size)
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    words = sum(len(text.split()) for text in texts)
    assert math.log(result["word_perplexity"]) == pytest.approx(nats / words, rel=1e-5)


def test_token_files_are_those_of_their_texts(
    weights: str, launcher: Launcher, tmp_path: Path
) -> None:
    """The corpus was preprocessed to the golden files; each file has its own results.

    Claim (serving): token files are evaluated as their texts
    """
    corpus = GOLDEN / "corpus.jsonl"
    tokens = GOLDEN / "GPT2BPETokenizer"
    output = tmp_path / "result.json"
    settings = {**SETTINGS, "load": weights, "valid_data": (corpus, tokens), "output": output}
    printed = launcher.start(settings, script=TOOL).succeed()

    result = json.loads(output.read_text(encoding="utf-8"))
    of_corpus = result["files"][str(corpus)]
    of_tokens = result["files"][str(tokens)]
    assert of_tokens == of_corpus
    assert result["tokens"] == 2 * of_corpus["tokens"] > 0
    assert result["loss"] == pytest.approx(of_corpus["loss"], rel=1e-6)
    rows = [line.split()[0] for line in printed.splitlines() if line.strip()][-3:]
    assert rows == [str(corpus), str(tokens), "total"]


def test_wikitext_is_evaluated_as_in_megatron(
    model: Any, weights: str, launcher: Launcher, tmp_path: Path
) -> None:
    """Claim (serving): WikiText-103 and LAMBADA are evaluated as in Megatron-LM"""
    file = tmp_path / "wiki.test.tokens"
    file.write_text(WIKITEXT, encoding="utf-8")
    settings = {"load": weights, "valid_data": file, "task": "WIKITEXT103"}
    result = evaluate(launcher, tmp_path, settings, script=TASKS)

    ids = encode(PLAIN)
    nats = rolling_nats(model, ids)
    words = len(re.findall(r"[^ ]+", WIKITEXT.strip()))
    assert (result["tokens"], result["words"]) == (len(ids) - 1, words)
    assert result["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert math.log(result["word_perplexity"]) == pytest.approx(nats / (words - 1), rel=1e-5)


@pytest.mark.parametrize("is_strict", [False, True])
def test_lambada_counts_predicted_ends(
    model: Any, weights: str, launcher: Launcher, tmp_path: Path, is_strict: bool
) -> None:
    """Claim (serving): WikiText-103 and LAMBADA are evaluated as in Megatron-LM"""
    file = tmp_path / "lambada.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in CLOZE), encoding="utf-8")
    settings: dict[str, object] = {"load": weights, "valid_data": file, "task": "LAMBADA"}
    if is_strict:
        settings["strict_lambada"] = True
    result = evaluate(launcher, tmp_path, settings, script=TASKS)

    correct = 0
    nats = 0.0
    tokens = 0
    for text in CLOZE:
        start, _, last = text.rstrip().rpartition(" ")
        target = encode(f" {last}") if is_strict else encode(text.rstrip())[-1:]
        ids = [*(encode(start) if is_strict else encode(text.rstrip())[:-1]), *target]
        ids = ids[-(LENGTH + 1) :]
        said = logprobs(model, ids[:-1])[-len(target) :]
        correct += said.argmax(dim=-1).tolist() == target
        nats -= float(said.gather(-1, torch.tensor(target)[:, None]).sum())
        tokens += len(target)
    assert (result["documents"], result["tokens"]) == (len(CLOZE), tokens)
    assert result["accuracy"] == correct / len(CLOZE) == 0.5
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-5)
