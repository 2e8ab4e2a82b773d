"""Every flag of Megatron-LM core 0.8 and of both forks sets an option, is ignored with a reason, or
is refused with an alternative.

The peers' flags are listed by name in tests/golden/peer_flags.txt; what happens to each is in
`megatron_ds/cli/megatron_flags.toml` alone. Where the peers' own declarations are next to the
repository (`../shared/reference/peer_flags.json`), the list is compared with them, and each flag is
tried with values of its peer's type. `python tests/unit/cli/test_peer_flags.py` rewrites the list.

tests/golden/today_flags.txt has the flags of Megatron-LM's branches main and dev of August 2026,
and the names that MindSpeed-LLM and Primus have besides.
"""

from __future__ import annotations

import json
import re
import textwrap
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.cli import flags
from megatron_ds.cli.command import table_of
from megatron_ds.cli.doctor.frameworks import _translate_key, trainer_table
from megatron_ds.cli.doctor.trainers.settings import Settings
from megatron_ds.cli.flags import Effect, Flag, FlagTable, dashed, training_flags
from megatron_ds.cli.scan import scan
from megatron_ds.config import Config, ModelConfig
from megatron_ds.inference.samples import options as generation_options
from megatron_ds.preprocess import command as preprocess_data
from megatron_ds.server import options as server_options
from tests.pages.flags import answer_of, flags_of_today, tool_tables
from tests.problems import codes
from tests.tables import tables as tables_beside

CASES = tables_beside(__file__)

REPOSITORY = Path(__file__).resolve().parents[3]
GOLDEN = REPOSITORY / "tests" / "golden" / "peer_flags.txt"
PEERS = REPOSITORY.parent / "shared" / "reference" / "peer_flags.json"
PEERS_TODAY = PEERS.with_name("peer_flags_now.json")
MOST_REFUSED = 41
"""Flags of Megatron-LM that are refused and belong to the pretraining of GPTs."""
NAMES = {"bigscience": "B", "microsoft": "M", "megatron-lm-core-0.8": "L"}
PRETRAIN = "pretrain"
TABLES: dict[str, FlagTable] = {
    PRETRAIN: training_flags(),
    "preprocess_data": table_of(preprocess_data.Options),
    "generate_samples_gpt": table_of(generation_options.Options),
    "run_text_generation_server": table_of(server_options.Options),
}
COUNTS = {"set": 245, "no_op": 25, "ignored": 183, "refused": 41}
"""Flags of all programs by outcome. A flag that becomes an option, or ceases to be one, counts."""
FLAG = re.compile(r"--[a-z][a-z0-9-]+(?!_)\b")
REFUSALS = (
    "unsupported-flag", "unsupported-value", "not-an-integer",
    "unexpected-argument",  # microsoft's --profile pt
    "invalid-choice",  # --dataloader-type external
)  # fmt: skip
SAMPLES = {"int": ["3"], "float": ["0.5"], "bool": ["True"]}
EXPRESSIONS = CASES["expressions"]
"""Choices that the peers compute."""
CHECKED_LATER = {"--tiktoken-pattern": ["v1", "v2"]}
"""Choices that a peer checks after parsing."""


def peers() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Declarations by flag, peer and tool."""
    if not PEERS.is_file():
        pytest.skip("the peers' declarations are not next to the repository")
    loaded: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(PEERS.read_text())
    return loaded


def rendered() -> str:
    """The list of names: a block for each tool and set of peers."""
    blocks: dict[str, list[str]] = {}
    for name, by_peer in sorted(peers().items()):
        for tool in sorted({tool for tools in by_peer.values() for tool in tools}):
            letters = "".join(NAMES[peer] for peer in by_peer if tool in by_peer[peer])
            blocks.setdefault(f"{tool} {letters}", []).append(name)
    wrapped = (
        f"{head}\n" + textwrap.fill(" ".join(names), 98, break_on_hyphens=False) + "\n"
        for head, names in sorted(blocks.items())
    )
    return "\n".join(wrapped)


def listed() -> Iterator[tuple[str, str]]:
    """(tool, flag) of the frozen list."""
    for block in GOLDEN.read_text().split("\n\n"):
        head, _, names = block.partition("\n")
        yield from ((head.split()[0], name) for name in names.split())


def test_every_flag_of_the_peers_is_known() -> None:
    """Claim (command-line): every flag of Megatron-LM core 0.8 and both Megatron-DeepSpeed forks is
    accepted, ignored with a reason, or rejected with an alternative"""
    flags_by_tool = list(listed())
    unknown = [
        (tool, name) for tool, name in flags_by_tool if dashed(name) not in TABLES[tool].by_name
    ]
    assert unknown == []
    assert len({name for _, name in flags_by_tool}) == 478
    counts = Counter(TABLES[tool].by_name[dashed(name)].outcome for tool, name in flags_by_tool)
    assert counts == COUNTS


def test_no_ignored_flag_changes_what_is_learned() -> None:
    """Claim (command-line): each flag that training ignores says what it changes in its program:
    only those that are listed apart, with what is done here instead, change numbers there"""
    table = training_flags()
    ignored = [flag for flag in table.foreign if flag.outcome == "ignored"]
    assert {flag.effect for flag in ignored} == set(typing.get_args(Effect))
    assert not [
        flag.label for flag in table.foreign if (flag.outcome == "ignored") != bool(flag.effect)
    ]
    differing = {flag.label for flag in ignored if flag.effect == "differs"}
    assert differing == {"--muon-tp-mode", "--muon-fp32-matmul-prec"}
    # A flag that acts only with others is harmless as long as those are refused.
    needed = {
        name
        for flag in ignored
        if flag.effect == "elsewhere"
        and (match := re.match("only (?:used )?with (--.*)", flag.help_text))
        for name in FLAG.findall(match[1])
    }
    assert len(needed) >= 5
    assert {table.by_name[name.removeprefix("--")].outcome for name in needed} == {"refused"}


@pytest.mark.parametrize(
    "line",
    [
        "--mup",
        "--mup-input-mult 2",
        "--mup --mup-output-mult 3 --mup-attn-mult 1",
        "--use-mup --mup-attn-mult 1",
        "--save-base-shapes",
        "--mutransfer",
    ],
)
def test_switches_and_factors_of_other_rates_for_the_width_are_refused(line: str) -> None:
    """Without the switch, which a newer program may know, the factors act in older ones."""
    assert set(codes(scan(line.split(), training_flags()).problems)) == {"unsupported-flag"}


@pytest.mark.parametrize(
    ("line", "alternative"),
    [
        ("--mup", "--use-mup --mup-base-hidden-size 128 --mup-independent-weight-decay"),
        ("--mup-input-mult 2", "--mup-embedding-mult"),
        ("--mup-attn-mult 2", "--mup-base-head-dim"),
        ("--mup-base-ffn-hidden-size 256", "--mup-base-hidden-size"),
        ("--scaling-recipe depth_mup", "--mup-base-num-layers"),
        ("--scaling-base-head-dim 64", "--mup-base-head-dim"),
    ],
)
def test_factors_of_other_programs_name_their_counterparts(line: str, alternative: str) -> None:
    (problem,) = scan(line.split(), training_flags()).problems
    assert alternative in problem


def test_the_frozen_list_is_that_of_the_peers() -> None:
    assert GOLDEN.read_text() == rendered()


def test_every_flag_of_today_has_an_answer() -> None:
    """Claim (command-line): every flag of Megatron-LM's main and dev branches and of MindSpeed-LLM,
    and every key of Primus, is accepted, ignored with a reason, or rejected with an alternative"""
    blocks = flags_of_today()
    unknown = [
        (owner, name) for owner, names in blocks.items() for name in names if not answer_of(name)
    ]
    assert {owner for owner, _ in unknown} <= {"Primus"}
    main = {*blocks["main+dev"], *blocks["main"], *blocks["dev"]}
    assert len(main) == 923
    refused = [name for name in main if answer_of(name) == "refused"]
    assert len(refused) <= MOST_REFUSED, refused


def test_the_list_of_today_is_that_of_megatron() -> None:
    if not PEERS_TODAY.is_file():
        pytest.skip("Megatron-LM's declarations are not next to the repository")
    declared = json.loads(PEERS_TODAY.read_text())
    branches = {name: spec["branch"] for name, spec in declared.items()}
    blocks = {
        owner: names for owner, names in flags_of_today().items() if owner in branches.values()
    }
    assert {name: owner for owner, names in blocks.items() for name in names} == branches
    for name, spec in declared.items():
        numbers = re.findall(r"^\(?\[?'?([\w.+-]+)'?\]?\)?$", str(spec["default"]))
        values = [*(spec["choices"] or ()), *(n for n in numbers if n not in ("None", "False"))]
        for value in values if answer_of(name) == "set" and spec["nargs"] != "0" else ():
            found = codes(scan([name, str(value)], training_flags()).problems)
            assert {*found} <= {"unsupported-value", "flag-requires-another"}, (name, value)


@pytest.mark.parametrize("value", [True, False])
def test_every_key_of_primus_is_read(value: bool) -> None:
    settings = Settings({})
    for name in flags_of_today()["Primus"]:
        key = name.removeprefix("--").replace("-", "_")
        settings.values[key] = value
        _translate_key(trainer_table("primus"), settings, key)
    assert [entry for entry in settings.lacking if "an unknown key" in entry] == []
    is_off = "--disable-bias-linear" in settings.flags
    assert is_off is not value
    assert ("--use-turbo-attention" in settings.flags) is value


MINDSPEED = CASES["mindspeed"]
"""Flags of MindSpeed-LLM by what they set."""


@pytest.mark.parametrize("line", MINDSPEED)
def test_flags_of_mindspeed_set_what_they_mean(line: str) -> None:
    scanned = scan(line.split(), training_flags())
    assert scanned.problems == scanned.warnings == []
    assert scanned.values == MINDSPEED[line]


MINDSPEED_REFUSED = CASES["mindspeed_refused"]


@pytest.mark.parametrize("line", MINDSPEED_REFUSED)
def test_flags_of_mindspeed_with_another_form_name_it(line: str) -> None:
    (problem,) = scan(line.split(), training_flags()).problems
    assert problem.code in REFUSALS
    assert MINDSPEED_REFUSED[line] in str(problem)


def test_every_flag_that_sets_nothing_gives_its_reason() -> None:
    for table in (*TABLES.values(), *tool_tables().values()):
        for flag in table.foreign:
            assert len(flag.help_text) > 10, flag
            assert flag.help_text[-1] not in ".;", flag


def test_every_flag_is_declared_once() -> None:
    table = training_flags()
    declared = [*table.own, *table.foreign]
    names = Counter(name for flag in declared for name in {dashed(each) for each in flag.names})
    assert [name for name, count in names.items() if count > 1] == []


def arguments_of(name: str, spec: dict[str, Any]) -> Iterator[list[str]]:
    """Values that a peer's parser accepts for a flag: each choice, or one of its type."""
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


def outcome_of(name: str, arguments: list[str]) -> str:
    """What a flag with these values leads to."""
    flag = training_flags().by_name[dashed(name)]
    line = scan([name, *arguments], training_flags())
    if line.problems:
        (problem,) = line.problems
        if flag.needs:
            assert (problem.code, problem.fields) == ("flag-requires-another", (flag.needs,))
            return "set"
        assert problem.code in REFUSALS, problem
        return "refused"
    if line.warnings:
        assert codes(line.warnings) == ["ignored-flag"]
        return "ignored"
    assert flag.outcome == "no_op" or flag.field in line.values or flag.accepted_values
    return "set"


def test_every_value_that_a_peer_accepts_has_an_outcome() -> None:
    """With each choice, type and default of each peer."""
    counts: Counter[str] = Counter()
    for name, by_peer in peers().items():
        for tools in by_peer.values():
            for arguments in arguments_of(name, tools[PRETRAIN]) if PRETRAIN in tools else ():
                outcome = outcome_of(name, arguments)
                flag = training_flags().by_name[dashed(name)]
                expected = {"no_op": "set", "ignored": "ignored"}.get(flag.outcome)
                if flag.outcome == "ignored" and set(arguments) & set(flag.accepted_values):
                    expected = "set"
                if expected is not None:
                    assert outcome == expected, name
                if flag.outcome == "refused" and not flag.accepted_values:
                    assert outcome == "refused", name
                counts[outcome] += 1
    assert counts.keys() == {"set", "ignored", "refused"}


def test_the_accepted_values_of_refused_flags_are_the_peers_defaults() -> None:
    """A command line that spells a default out still runs."""
    loaded = peers()
    for flag in training_flags().foreign:
        for value in flag.accepted_values:
            specs = [
                tools[PRETRAIN]
                for tools in loaded.get(f"--{flag.names[0]}", {}).values()
                if PRETRAIN in tools
            ]
            if not specs:
                continue  # a flag of preprocess_data.py, or of today's Megatron-LM
            if flag.names == ("spec",):
                continue  # names of Python modules
            defaults = {str(spec.get("default")).strip("[]") for spec in specs}
            choices = {choice for spec in specs for choice in spec.get("choices", [])}
            assert {value, f"{value}.0"} & (defaults | choices), flag


SAME_DEFAULTS = {
    "--glu-activation", "--model-parallel-size", "--moe-z-loss-coeff", "--num-experts",
    "--position-embedding-type", "--recompute-num-layers", "--split", "--vocab-size",
    "--zero-stage",
    "--dataloader-type",  # None stands for single
    "--pp-partition-method",  # None stands for type:transformer
    "--rotary-seq-len-interpolation-factor",  # None stands for 1
    "--profile-ranks", "--wandb-exp-name", "--wandb-project", "--wandb-save-dir",
}  # fmt: skip
"""Flags whose peer's default is spelled differently, or is that of another name."""


def test_every_different_default_is_documented() -> None:
    ours = {name: value for group in Config().to_dict().values() for name, value in group.items()}
    differ = set()
    for name, by_peer in peers().items():
        flag = training_flags().by_name.get(dashed(name))
        if flag is None or flag.outcome != "set" or flag.required:
            continue
        for spec in (tools[PRETRAIN] for tools in by_peer.values() if PRETRAIN in tools):
            own = ours[flag.field]
            same = flag.const != own if flag.nargs == 0 else is_same(spec.get("default"), own, flag)
            differ |= set() if same else {name}
    assert differ - SAME_DEFAULTS == {f"--{entry['flag']}" for entry in flags.different_defaults()}


def is_same(theirs: Any, ours: Any, flag: Flag) -> bool:
    if isinstance(theirs, int | float) and isinstance(ours, int | float):
        return float(theirs) == float(ours)
    return flag.synonyms.get(str(theirs), theirs) == ours


def test_numeric_flags_of_the_peers_are_numeric() -> None:
    table = training_flags()
    for name, by_peer in peers().items():
        for tools in by_peer.values():
            spec = tools.get(PRETRAIN, {})
            flag = table.by_name.get(dashed(name))
            if flag is None or flag.outcome != "set" or spec.get("type") not in ("int", "float"):
                continue
            assert flag.kind in (int, float), name
            one = (flag.kind(1),) if flag.nargs == "*" else flag.kind(1)
            assert "1" in spec["type"] or scan([name, "1"], table).values == {flag.field: one}


def test_names_in_other_trainers_lead_to_existing_flags() -> None:
    table = training_flags()
    options = {dashed(name) for flag in table.own for name in flag.names}
    names = [*table.same, *table.advice]
    assert len(names) == len({*names}) > 200
    assert options.isdisjoint(names)
    assert {dashed(name) for name in table.same.values()} <= options
    mentioned = {dashed(flag) for text in table.advice.values() for flag in FLAG.findall(text)}
    assert mentioned <= options


HINTS = CASES["hints"]


@pytest.mark.parametrize(("line", "expected"), HINTS)
def test_names_in_other_trainers_are_explained(line: str, expected: str) -> None:
    found = scan(line.split(), training_flags())
    assert codes(found.problems) == ["unknown-flag"]
    assert expected in str(found.problems[0])
    is_name = expected.startswith("--") and not expected.startswith("--global")
    assert bool(found.unreadable) == is_name


@pytest.mark.parametrize("flag", ["--sample-rat", "--add-bias-linear", "--sync-tp-duplicated"])
def test_neither_ignored_flags_nor_opposites_are_suggested(flag: str) -> None:
    (problem,) = scan([flag], training_flags()).problems
    assert problem.code == "unknown-flag"
    assert "--help" in str(problem)


ASCEND = "--next-tockens 0 --shape-order SBH --sparse-mode 0 --use-contiguous-buffers-in-local-ddp"


@pytest.mark.parametrize(
    ("tokens", "window"), [("65536", None), ("2048", None), ("2047", None), ("511", 512)]
)
def test_tokens_before_a_token_are_a_window_unless_they_are_all(
    tokens: str, window: int | None
) -> None:
    line = scan(f"--pre_tockens {tokens} --seq-length 2048 {ASCEND}".split(), training_flags())
    assert line.problems == []
    assert {*codes(line.warnings)} == {"ignored-flag"}
    assert ModelConfig(num_layers=1, **line.values).window == window


def test_refused_values_of_supported_flags_name_the_reason() -> None:
    for value, reason in flags.refused_values()["tokenizer_type"].items():
        (problem,) = scan(["--tokenizer-type", value], training_flags()).problems
        assert problem.code == "unsupported-value"
        assert reason in str(problem)


@pytest.mark.parametrize(
    "words",
    [
        "--fp8-recipe delayed",
        "--fp8-recipe mxfp8",
        "--fp8-recipe custom",
        "--fp8-param-gather",
        "--fp8-margin 0",
        "--fp8-amax-history-len 1024",
        "--fp8-amax-compute-algo max",
        "--fp8-interval 1",
        "--no-fp8-wgrad",
        "--fp8-output-proj",
    ],
)
def test_other_kinds_of_fp8_are_refused_by_name(words: str) -> None:
    """Claim (command-line): `--fp8-format` is Megatron-LM's with `--fp8-recipe tensorwise`; other
    recipes and their flags are rejected"""
    accepted = "--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    line = scan([*accepted.split(), *words.split()], training_flags())
    assert [problem.code.partition("-")[0] for problem in line.problems] == ["unsupported"]
    assert line.warnings == []
    line = scan([*accepted.split(), "--fp8-recipe", "tensorwise"], training_flags())
    assert (line.problems, line.warnings) == ([], [])
    assert line.values["num_layers_at_end_in_bf16"] == 2


if __name__ == "__main__":
    GOLDEN.write_text(rendered())
