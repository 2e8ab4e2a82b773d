"""Every flag of Megatron-LM core 0.8 and of both forks is supported, dropped with a reason, or
refused with what to use instead.

The frozen list of them is checked everywhere; where the peers' own lists lie beside the repository
(`../shared/reference/peer_flags.json`), each flag is also tried with values of its peer's type.
`python tests/unit/cli/test_megatron_flags.py` rewrites the frozen list.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.cli import flags, megatron_flags
from megatron_ds.cli.arguments import scan
from megatron_ds.cli.flags import Flag, dashed
from megatron_ds.config import Config
from tools import generate_samples_gpt, preprocess_data, run_text_generation_server

REPOSITORY = Path(__file__).resolve().parents[3]
GOLDEN = REPOSITORY / "tests" / "golden" / "peer_flags.txt"
PEERS = REPOSITORY.parent / "shared" / "reference" / "peer_flags.json"
NAMES = {"bigscience": "B", "microsoft": "M", "megatron-lm-core-0.8": "L"}
PRETRAIN = "pretrain"
SAMPLES = {"int": ["3"], "float": ["0.5"], "bool": ["True"]}
EXPRESSIONS = {
    "megatron.model.glu_activations.GLU_ACTIVATIONS.keys()": ["geglu", "liglu", "reglu", "swiglu"],
    "list(PositionEmbeddingType)": ["rotary", "absolute", "alibi"],
    "list(log_levels.keys())": ["debug", "info", "warning", "error", "critical", "passive"],
    "[e.value for e in StrictHandling]": ["assume_ok_unexpected", "ignore_all"],
    "range(0, 3)": ["0", "1", "2"],
}
"""Choices that the peers compute."""
CHECKED_LATER = {"--tiktoken-pattern": ["v1", "v2"]}
"""Choices that a peer's parser does not know, but the code behind it."""


def peers() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """flag -> peer -> tool -> what its parser says of it."""
    if not PEERS.is_file():
        pytest.skip("the peers' own lists of flags are not beside the repository")
    loaded: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(PEERS.read_text())
    return loaded


def fate(flag: Flag) -> str:
    """What becomes of a flag, in a word or two."""
    if flag.outcome == "set":
        return f"sets {flag.field}"
    if flag.outcome == "refused" and flag.accepted_values:
        return f"refused but at {' '.join(flag.accepted_values)}"
    return {"always": "always so", "dropped": "no effect", "refused": "refused"}[flag.outcome]


def fate_in(tool: str, name: str) -> str:
    if tool == PRETRAIN:
        return fate(flags.all_flags()[dashed(name)])
    if tool == "preprocess_data":
        dropped = dashed(name) in megatron_flags.PREPROCESS_WITHOUT_EFFECT
        return "no effect" if dropped else "supported"
    return "supported"


def frozen() -> list[tuple[str, str, str, str]]:
    """(flag, tool, peers, fate) of every line of the frozen list."""
    lines = [line for line in GOLDEN.read_text().splitlines() if line[:2] == "--"]
    return [tuple(line.split(" | ")) for line in lines]  # type: ignore[misc]


def rendered() -> str:
    rows = []
    for name, by_peer in peers().items():
        for tool in sorted({tool for tools in by_peer.values() for tool in tools}):
            letters = "".join(NAMES[peer] for peer in by_peer if tool in by_peer[peer])
            rows.append((name, tool, letters, fate_in(tool, name)))
    counts = Counter((tool, kind(fate)) for _, tool, _, fate in rows)
    head = [f"{tool}: {count} {what}" for (tool, what), count in sorted(counts.items())]
    return "\n".join([*head, "", *(" | ".join(row) for row in sorted(rows))]) + "\n"


def kind(fate: str) -> str:
    if fate.startswith("refused"):
        return "refused"
    return "no effect" if fate == "no effect" else "supported"


def test_the_fate_of_every_flag_is_frozen() -> None:
    rows = frozen()

    assert len({name for name, *_ in rows}) == 478
    assert [row for row in rows if row[3] != fate_in(row[1], row[0])] == []


def test_the_frozen_list_is_that_of_the_peers() -> None:
    assert GOLDEN.read_text() == rendered()


def test_every_flag_that_is_dropped_or_refused_gives_its_reason() -> None:
    tables = (
        *(flags.foreign_flags()),
        *(
            flags.of_peer(name, peer, "dropped")
            for name, peer in megatron_flags.PREPROCESS_WITHOUT_EFFECT.items()
        ),
    )
    for flag in tables:
        assert len(flag.explanation) > 10, flag
        assert flag.explanation[-1] not in ".;", flag


def test_no_flag_stands_in_two_tables() -> None:
    names = [
        name
        for flag in (*itertools.chain(*flags.groups().values()), *flags.foreign_flags())
        for name in {dashed(each) for each in flag.names}
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def words_of(name: str, spec: dict[str, Any]) -> Iterator[list[str]]:
    """Values that a peer's parser takes for a flag: each choice, or one of its type."""
    if "action" in spec and spec["action"].startswith("store_"):
        yield []
        return
    choices = CHECKED_LATER.get(name, spec.get("choices"))
    if isinstance(choices, str):
        choices = EXPRESSIONS[choices]
    for value in choices or SAMPLES.get(str(spec.get("type")), ["text"]):
        count = {"*": 3, "+": 2}.get(spec.get("nargs"), 1)
        yield [str(value)] * count
    default = spec.get("default")
    if isinstance(default, int | float) and not choices and spec.get("nargs") is None:
        yield [str(default)]


def answers(name: str, words: list[str]) -> str:
    """What a flag with these values leads to; an assertion if it is no answer in words."""
    flag = flags.all_flags()[dashed(name)]
    said = scan([name, *words])
    if said.problems:
        (problem,) = said.problems
        assert problem.startswith(f"{name} {words[0] if words else ''}".strip()), problem
        assert "is not supported: " in problem or "must be a whole number" in problem, problem
        return "refused"
    if said.warnings:
        (warning,) = said.warnings
        assert warning == f"{name} has no effect: {flag.explanation}"
        return "no effect"
    assert flag.outcome == "always" or flag.field in said.values or flag.accepted_values
    return "supported"


def test_every_value_that_a_peer_takes_gets_an_answer() -> None:
    """With each choice, type and default of each peer: set, dropped with the reason, refused."""
    counts: Counter[str] = Counter()
    for name, by_peer in peers().items():
        for tools in by_peer.values():
            if PRETRAIN not in tools:
                continue
            for words in words_of(name, tools[PRETRAIN]):
                answer = answers(name, words)
                flag = flags.all_flags()[dashed(name)]
                expected = {"always": "supported", "dropped": "no effect"}.get(flag.outcome)
                if expected is not None:
                    assert answer == expected, name
                if flag.outcome == "refused" and not flag.accepted_values:
                    assert answer == "refused", name
                counts[answer] += 1
    assert counts.keys() == {"supported", "no effect", "refused"}


def test_the_values_at_which_a_refused_flag_is_accepted_are_the_peers_defaults() -> None:
    """So that a command line that spells a default out still runs."""
    known, loaded = flags.all_flags(), peers()
    for flag in known.values():
        for value in flag.accepted_values:
            specs = [tools[PRETRAIN] for tools in loaded[f"--{flag.names[0]}"].values()]
            defaults = {str(spec.get("default")).strip("[]") for spec in specs}
            choices = {choice for spec in specs for choice in spec.get("choices", [])}
            assert {value, f"{value}.0"} & (defaults | choices), flag


SAME_DEFAULTS = {
    "--glu-activation", "--model-parallel-size", "--position-embedding-type",
    "--recompute-num-layers", "--split", "--zero-stage",
}  # fmt: skip
"""Where a peer's default is written otherwise, or is that of another name of the setting."""


def test_every_default_that_differs_is_told() -> None:
    config = Config()
    ours = {name: value for group in config.to_dict().values() for name, value in group.items()}
    differ = set()
    for name, by_peer in peers().items():
        flag = flags.all_flags().get(dashed(name))
        if flag is None or flag.outcome != "set":
            continue
        for tools in by_peer.values():
            spec, own = tools.get(PRETRAIN), ours[flag.field]
            if spec is None:
                continue
            if flag.takes == 0:
                same = flag.const != own
            else:
                same = is_same(spec.get("default"), own, flag)
            differ |= set() if same else {name}
    assert differ - SAME_DEFAULTS == {f"--{name}" for name in megatron_flags.DEFAULTS}


def is_same(theirs: Any, ours: Any, flag: Flag) -> bool:
    if isinstance(theirs, int | float) and isinstance(ours, int | float):
        return float(theirs) == float(ours)
    return flag.synonyms.get(str(theirs), theirs) == ours


def test_numbers_that_a_peer_has_as_default_are_read() -> None:
    """Types agree: a value of the peer's type is one of ours."""
    known = flags.all_flags()
    for name, by_peer in peers().items():
        for tools in by_peer.values():
            spec = tools.get(PRETRAIN, {})
            flag = known.get(dashed(name))
            if flag is None or flag.outcome != "set" or spec.get("type") not in ("int", "float"):
                continue
            assert flag.kind in (int, float), name
            assert "1" in spec["type"] or scan([name, "1"]).values == {flag.field: flag.kind(1)}


def test_preprocess_data_answers_every_flag_of_the_peers() -> None:
    needed = [
        "--input", "a.jsonl", "--output-prefix", "b", "--tokenizer-type", "NullTokenizer",
        "--vocab-size", "10", "--split-sentences",
    ]  # fmt: skip
    for name, tool, _, fate in frozen():
        if tool != "preprocess_data":
            continue
        words = {
            "--tokenizer-type": ["NullTokenizer"],
            "--dataset-impl": ["mmap"],
            "--vocab-size": ["10"],
        }.get(name, ["1"])
        switch = name in ("--append-eod", "--split-sentences", "--keep-newlines",
                          "--keep-sequential-samples", "--trust-remote-code")  # fmt: skip
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                preprocess_data.parse([*needed, name, *([] if switch else words)])
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
        assert (code == 2) == (fate == "refused"), (name, said.getvalue())
        assert (f"{name} has no effect: " in said.getvalue()) == (fate == "no effect"), name
        if fate == "refused":
            assert f"{name} is not supported: " in said.getvalue()


@pytest.mark.parametrize(
    ("flag", "field"), [("--tokenizer-type", "tokenizer_type"), ("--dataset-impl", "data_impl")]
)
def test_preprocess_data_refuses_values_of_the_peers_in_words(
    flag: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, words in megatron_flags.REFUSED_VALUES[field].items():
        with pytest.raises(SystemExit):
            preprocess_data.parse(["--input", "a", "--output-prefix", "b", flag, value])
        assert f"{flag}: {value} is not supported: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("program", [generate_samples_gpt, run_text_generation_server])
def test_generation_takes_every_flag_of_the_peers(program: Any) -> None:
    names = [name for name, tool, *_ in frozen() if tool == program.__name__.split(".")[-1]]

    assert names
    for name in names:
        switch = name in ("--greedy", "--recompute")
        _, problems = program.parse([name, *([] if switch else ["1"])])
        words = ("there is no flag", "is not supported", "must be", "needs a value")
        assert not any(word in problem for problem in problems for word in words), problems


if __name__ == "__main__":
    GOLDEN.write_text(rendered())
