"""The page docs/use/engines.md, from the table of facts and the record of the engines that ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ds.conversion.engines.facts import (
    CLOSE,
    DIFFERS,
    ENGINES,
    FACTS,
    PLAIN_NAMES,
    REFUSES,
    SPECIAL_TOKENS,
    Fact,
)

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "docs" / "use" / "engines.md"
RESULTS = REPOSITORY / "tests" / "engines" / "results.json"
HEAD = """\
# Inference engines

For people who export a model: in which engines it is the model that was trained.

Written by `make proofs ONLY=engines`, which exports small models with random weights of every
family, runs them in the engines, each with the packages of its own environment, and compares log
probabilities of 128 tokens in fp32 with those of this program; mistral.rs reports the ten likeliest
tokens after three prompts only. "equal" is a difference of at most 1e-3 and the same greedy text
through the engine's own tokenizer. All other results have a row in the tables below, which are
those of `megatron_ds/conversion/engines/facts.toml`. They hold for the versions that are named.

[`tools/convert_checkpoint.py --for vllm,mlx`](../checkpoints/conversion.md#for-inference-engines)
checks a model for engines before it is written. Without `--for`, one line of the output names the
engines that would compute another model or refuse it.

"""
EFFECTS = {
    REFUSES: "refused",
    DIFFERS: "another model, without a word",
    CLOSE: "close",
}
OUTCOMES = {
    "equal": "equal",
    "close": "close",
    "differs": "another model",
    "refused": "refused",
}
"""Titles by what an engine made of a model."""
CHANGES = {
    PLAIN_NAMES: "names without the prefix",
    SPECIAL_TOKENS: "the end token is named as begin and unknown token",
}
LOADED = {"hf": "`--to hf`", "gguf": "`--to gguf`"}


def page() -> str:
    """The text of the page."""
    results: dict[str, Any] = {}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [HEAD, *_summary(results), *_cases(results)]
    for engine in ENGINES:
        lines += _facts(engine)
    return "".join(lines)


def _summary(results: dict[str, Any]) -> Iterator[str]:
    titles = ("engine", "export", "package and version", *OUTCOMES.values(), "last run")
    yield f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
    for name, engine in ENGINES.items():
        start = f"| {engine.title} | {LOADED[engine.format]} | {engine.package}"
        record = results.get(name)
        if record is None:
            yield f"{start} {engine.version} | | | | | **not run** |\n"
            continue
        found = [_cell(case) for case in record["cases"].values()]
        counts = [sum(cell.startswith(word) for cell in found) for word in OUTCOMES]
        shown = " | ".join(map(str, counts))
        dates = sorted({case.get("date", record["date"]) for case in record["cases"].values()})
        days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        yield f"{start} {record['version']} | {shown} | {days} |\n"
    yield "\n"
    where: dict[str, list[str]] = {}
    for name, record in results.items():
        packages = f", transformers {record['transformers']}" if record["transformers"] else ""
        where.setdefault(f"{record['machine']}{packages}", []).append(ENGINES[name].title)
    for place, titles in where.items():
        yield f"* {', '.join(titles)}: {place}\n"
    yield "\n"


def _cell(case: dict[str, Any]) -> str:
    """What an engine made of a model, in short."""
    outcome = case["outcome"]
    if outcome == "crashed":
        return "refused (the process ends)"
    if outcome == "refused":
        return outcome
    text = "" if case.get("same text", True) else ", another text"
    return f"{outcome} {case['difference']:.0e}{text}"


def _cases(results: dict[str, Any]) -> Iterator[str]:
    """A row for each model."""
    names = list(dict.fromkeys(name for record in results.values() for name in record["cases"]))
    if not names:
        return
    yield "## Results\n\nThe models are in `tests/engines/models.yaml`.\n\n"
    titles = [ENGINES[engine].title for engine in ENGINES if engine in results]
    yield f"| model | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}\n"
    for name in names:
        cells = []
        for engine in ENGINES:
            if engine in results:
                case = results[engine]["cases"].get(name)
                cells.append("" if case is None else _cell(case))
        yield f"| {name} | {' | '.join(cells)} |\n"
    yield "\n"


def _facts(name: str) -> Iterator[str]:
    yield f"## {ENGINES[name].title}\n\n"
    yield "| families | with | effect | because | source |\n|---|---|---|---|---|\n"
    for fact in FACTS:
        if fact.engine == name:
            families = ", ".join(fact.families) or "all"
            cells = (families, _condition(fact), _effect(fact), fact.why, f"`{fact.source}`")
            yield f"| {' | '.join(cells)} |\n".replace("`run`", "a run")
    yield "\n"


def _condition(fact: Fact) -> str:
    if fact.values is not None:
        return f"`{fact.key}` {', '.join(map(_value, fact.values))}"
    if fact.other_than is not None:
        return f"`{fact.key}` other than {', '.join(map(_value, fact.other_than))}"
    return "any"


def _value(value: Any) -> str:
    return "null" if value == "" else json.dumps(value).strip('"')


def _effect(fact: Fact) -> str:
    text = EFFECTS[fact.effect]
    if fact.difference is not None:
        text += f", {fact.difference:g}"
    if fact.only_on:
        text += f" (on {fact.only_on} only)"
    if fact.adapt:
        text += f"; `--for` changes it: {CHANGES[fact.adapt]}"
    return text
