"""The command line: every spelling, every error with a hint, and a frozen list of flags."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.cli import arguments
from megatron_ds.cli.arguments import ParsedLine, build_config, parse, scan
from megatron_ds.cli.flags import all_flags, groups, help_text, version_text
from megatron_ds.config import TOKENIZERS, Config

REPOSITORY = Path(__file__).parents[3]
GOLDEN = REPOSITORY / "tests" / "golden" / "flags.txt"


def config_of(line: str) -> Config:
    return build_config(line.split(), world_size=1, warn=lambda _: None)[0]


def problems_of(line: str) -> list[str]:
    return build_config(line.split(), world_size=1, warn=lambda _: None)[1]


def scan_of(line: str) -> ParsedLine:
    return scan(line.split())


def test_the_list_of_flags_is_frozen():
    """A new flag is a visible change: python tests/unit/cli/test_arguments.py rewrites the list."""
    assert flag_list() == GOLDEN.read_text()


def flag_list() -> str:
    lines = []
    for flags in groups().values():
        for flag in flags:
            kind = "switch" if flag.takes == 0 else flag.kind.__name__.replace("str", "text")
            names = " ".join(f"--{name}" for name in flag.names)
            lines.append(f"{names}: {kind}")
    return "\n".join(sorted(lines)) + "\n"


@pytest.mark.parametrize("flag", ["--num-layers", "--num_layers"])
def test_dashes_and_underscores(flag):
    assert config_of(f"{flag} 3").model.num_layers == 3
    assert config_of(f"{flag}=3").model.num_layers == 3


def test_no_two_flags_share_a_name():
    names = [
        name.replace("_", "-")
        for flags in groups().values()
        for flag in flags
        for name in {each.replace("_", "-") for each in flag.names}
    ]
    assert len(names) == len(set(names))


def test_numbers_may_be_grouped_or_have_an_exponent():
    config = config_of(
        "--train-samples 10_000 --rampup-batch-size 2 2 1_000 --seq-length 1e3 "
        "--loss-scale-window 500.0 --lr 1e-4"
    )
    assert config.schedule.train_samples == 10000
    assert config.schedule.rampup_batch_size == (2, 2, 1000)
    assert config.model.seq_length == 1000
    assert isinstance(config.model.seq_length, int)
    assert config.precision.loss_scale_window == 500
    assert config.optimizer.lr == 1e-4


@pytest.mark.parametrize("value", ["two", "1.5", "1e99", "nan", "inf", "1__0", "0x10", "1,000"])
def test_what_is_no_whole_number_is_named_with_its_flag(value):
    assert f"--num-layers {value}: must be a whole number" in problems_of(f"--num-layers {value}")


def test_what_is_no_number_is_named_with_its_flag():
    assert "--lr fast: must be a number" in problems_of("--lr fast")


def test_negative_values_are_values():
    assert config_of("--seed -1 --lr -1e-5 --min-lr=-.5").runtime.seed == -1
    assert "--lr -1e-05: must not be negative" in problems_of("--lr -1e-5")


def test_an_empty_value_is_an_error():
    """A shell variable that is not set, most of the time."""
    assert "--save has an empty value" in scan(["--save", ""]).problems
    assert "--lr has an empty value" in scan(["--lr="]).problems


def test_aliases_reach_the_same_field():
    config = config_of(
        "--num-key-value-heads 2 --layernorm-epsilon 1e-6 --rotary-position-embeddings-theta 5e5 "
        "--position-embedding-type rotary --normalization rmsnorm --tokenizer-type PretrainedFromHF"
    )
    assert config.model.num_query_groups == 2
    assert config.model.norm_epsilon == 1e-6
    assert config.model.rotary_base == 5e5
    assert config.model.position_embedding_type == "rope"
    assert config.model.normalization == "RMSNorm"
    assert config.tokenizer.tokenizer_type == "HFTokenizer"


def test_switches_turn_off_what_is_on_by_default():
    config = config_of("--disable-bias-linear --no-bias-gelu-fusion")
    assert config.model.add_bias_linear is False
    assert config.model.bias_gelu_fusion is False
    assert config_of("").model.add_bias_linear is True


def test_flags_that_stand_for_a_value():
    assert config_of("--swiglu").model.activation == "swiglu"
    assert config_of("--openai-gelu").model.activation == "openai-gelu"
    assert config_of("--use-rotary-position-embeddings").model.position_embedding_type == "rope"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("--no-position-embedding", "none"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--no-position-embedding --position-embedding-type alibi", "alibi"),
        ("--position-embedding-type none --no-position-embedding", "none"),
    ],
)
def test_no_position_embedding_leaves_other_positions(line, kind):
    """Llama scripts give it beside the flag for rotary embeddings."""
    assert config_of(line).model.position_embedding_type == kind
    assert not any("contradict" in problem for problem in problems_of(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--swiglu --activation gelu", "--swiglu and --activation gelu"),
        ("--micro-batch-size 2 --batch-size 4", "--micro-batch-size 2 and --batch-size 4"),
        (
            "--no-position-embedding --position-embedding-type learned_absolute",
            "--position-embedding-type learned_absolute and --no-position-embedding",
        ),
        (
            "--no-accumulate-allreduce-grads-in-fp32 --accumulate-allreduce-grads-in-fp32",
            "--no-accumulate-allreduce-grads-in-fp32 and --accumulate-allreduce-grads-in-fp32",
        ),
    ],
)
def test_two_flags_that_give_one_field_different_values_contradict(line, expected):
    assert f"{expected} contradict each other" in problems_of(line)


def test_two_flags_that_agree_do_not_contradict():
    said = scan_of("--swiglu --activation swiglu --batch-size 2 --micro-batch-size 2")
    assert said.problems == []


def test_the_last_of_a_repeated_flag_is_taken_with_a_warning():
    said = scan_of("--lr 1e-3 --num-layers 2 --lr 2e-3 --num_layers 2")
    assert said.values == {"lr": 2e-3, "num_layers": 2}
    assert said.warnings == ["--lr 1e-3 is followed by --lr 2e-3, which is taken"]
    assert said.problems == []


def test_glu_activation_keeps_the_width_of_its_fork():
    assert config_of("--hidden-size 96 --glu-activation swiglu").model.ffn == 384
    assert config_of("--hidden-size 96 --swiglu").model.ffn == 256
    assert config_of("--hidden-size 96 --ffn-hidden-size 8 --glu-activation geglu").model.ffn == 8


def test_what_was_given_is_remembered():
    given = config_of("--num-layers 2 --swiglu --use-flash-attn").given
    assert given == {"num_layers", "activation"}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--num-layerz", "--num-layers"),
        ("--num_layerz", "--num-layers"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--sequence-paralel", "--sequence-parallel"),
        ("--warmup-fraction", "--lr-warmup-fraction"),
        ("-lr", "--lr"),
    ],
)
def test_a_typo_gets_the_nearest_name(wrong, right):
    """Ours, and the peers' too."""
    assert f"there is no flag {wrong}; did you mean {right}?" in problems_of(f"{wrong} 3")


def test_a_program_may_add_the_names_of_its_own_flags_to_the_hints():
    problems = scan(["--temperatur", "1"], also=["--temperature"]).problems
    assert problems == ["there is no flag --temperatur; did you mean --temperature?"]


def test_a_name_unlike_all_others_points_to_the_help():
    assert "there is no flag --qqqqqqqqqq (--help lists the flags)" in problems_of("--qqqqqqqqqq")


def test_a_choice_that_is_none_gets_the_nearest():
    assert (
        "--lr-decay-style Cosin: must be one of constant, linear, cosine, inverse-square-root, "
        "WSD; did you mean cosine?"
    ) in problems_of("--lr-decay-style Cosin")


def test_a_choice_of_a_peer_says_what_to_do():
    (problem,) = [line for line in problems_of("--data-impl lazy") if "--data-impl" in line]
    assert problem.startswith("--data-impl lazy is not supported: ")
    assert "tools/preprocess_data.py" in problem


def test_a_refused_flag_says_what_to_do_and_takes_its_values_along():
    problems = scan_of("--warmup 5 --skip-train-iteration-range 1-2 5-7").problems
    assert len(problems) == 2
    assert problems[0].startswith("--warmup 5 is not supported: ")
    assert "--lr-warmup-samples" in problems[0]
    assert problems[1].startswith("--skip-train-iteration-range 1-2 5-7 is not supported: ")


def test_a_refused_flag_is_accepted_where_it_asks_for_what_is_done():
    said = scan_of(
        "--num-experts 1 --context-parallel-size 1 --dataloader-type single --head-lr-mult 1.0 "
        "--recompute-method uniform"
    )
    assert said.problems == said.warnings == []
    assert len(scan_of("--num-experts 1 2 --dataloader-type cyclic").problems) == 2
    assert len(scan(["--num-experts"]).problems) == 1


def test_a_flag_without_effect_is_a_warning():
    said = scan_of("--use-flash-attn --DDP-impl local --profile-ranks 0 1 --profile")
    assert [line.split(" no effect: ")[0] for line in said.warnings] == [
        "--use-flash-attn has",
        "--DDP-impl has",
        "--profile-ranks, --profile have",
    ]
    assert said.problems == []


def test_a_flag_for_what_is_always_done_is_accepted_without_a_word():
    said = scan_of("--attention-softmax-in-fp32 --exit-signal-handler")
    assert said.problems == said.warnings == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("stray --num-layers 2", "'stray' belongs to no flag"),
        ("--num-layers 2 stray", "'stray' belongs to no flag: --num-layers takes one value"),
        ("--fp16 true", "'true' belongs to no flag: --fp16 takes no value"),
        ("--fp16=true", "'true' belongs to no flag: --fp16 takes no value"),
        ("--num-layers --fp16", "--num-layers needs a value: --num-layers N"),
        ("--data-path", "--data-path needs a value: --data-path PATH ..."),
        (
            "--rampup-batch-size 2 2",
            "--rampup-batch-size needs 3 values, not 2: --rampup-batch-size N N N",
        ),
    ],
)
def test_wrong_numbers_of_values_are_named(line, expected):
    assert expected in problems_of(line)


def test_all_errors_of_a_line_are_named_at_once():
    """Wrong values, an unknown flag, a refused one, a stray word and contradictions."""
    problems = problems_of(
        "--num-layers two --lr-decay-style cos --hiden-size 8 --sequence-parallel --fp16 yes "
        "--micro-batch-size 2 --batch-size 4 --num-attention-heads 2.5 --hidden-size 9 --bf16 "
        "--seq-length 16 --weight-decay"
    )
    text = "\n".join(problems)
    for expected in (
        "--num-layers two: must be a whole number",
        "--lr-decay-style cos: must be one of",
        "there is no flag --hiden-size; did you mean --hidden-size?",
        "--sequence-parallel is not supported",
        "'yes' belongs to no flag",
        "--micro-batch-size 2 and --batch-size 4 contradict each other",
        "--num-attention-heads 2.5: must be a whole number",
        "--weight-decay needs a value",
        "--fp16 and --bf16",
        "--lr is required",
        "--train-iters, --train-samples or --train-tokens is required",
    ):
        assert expected in text


def test_what_follows_from_a_value_that_could_not_be_read_is_not_named():
    problems = problems_of("--num-layers two --tokenizer-type GPT2BPE")
    assert not any("--num-layers is required" in line for line in problems)
    assert [line for line in problems if "--tokenizer-type" in line] == [
        f"--tokenizer-type GPT2BPE: must be one of {', '.join(TOKENIZERS)}; "
        "did you mean GPT2BPETokenizer?"
    ]


VALUES = ("0", "-1", "2", "1e3", "nan", "inf", "", "1__0", "9" * 5000, "x", "-", "--", "\0", "é")


@given(
    flags=st.lists(st.sampled_from(sorted(all_flags())), max_size=4),
    values=st.lists(st.sampled_from(VALUES), min_size=8, max_size=8),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_line_raises(flags, values):
    """Whatever stands there: a configuration and a list of problems."""
    line = [word for pair in zip(flags, values, strict=False) for word in (f"--{pair[0]}", pair[1])]
    config, _ = build_config([*line, *values[4:6]], world_size=2, warn=lambda _: None)
    assert isinstance(config, Config)


def test_a_mistyped_flag_is_not_called_missing_as_well():
    assert not any("--hidden-size is required" in line for line in problems_of("--hiden-size 8"))
    line = "--batch-sise 8 --num-layerz 2 --num-layers 0"
    assert not any("--micro-batch-size is required" in each for each in problems_of(line))
    assert "--num-layers 0: must be positive" in problems_of(line)


def test_parse_ends_the_program_and_names_all(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--num-layers", "2"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "--hidden-size is required" in shown
    assert "--lr is required" in shown


def test_only_the_first_rank_speaks(capsys):
    for line in ([], ["--use-flash-attn"], ["--help"], ["--version"]):
        with pytest.raises(SystemExit):
            parse(line, rank=1)
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("ended", "said"), [(True, False), (False, True)])
def test_a_launched_rank_speaks_where_the_first_one_has_not(monkeypatch, capsys, ended, said):
    def wait(seconds):
        if ended:
            raise SystemExit  # as the handler of the launcher's signal does

    monkeypatch.setattr(arguments, "find_launchers", lambda: ("a launcher",))
    monkeypatch.setattr(arguments.time, "sleep", wait)
    with pytest.raises(SystemExit) as end:
        parse([], rank=1)
    assert end.value.code == 2
    assert ("--lr is required" in capsys.readouterr().err) is said


def test_schedule_problems_are_among_them():
    line = "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --lr-warmup-iters 20"
    assert any("warm-up" in problem for problem in problems_of(line))


def test_help_and_version_end_the_program_in_order(capsys):
    for words, text in ((["--lr", "x", "--help"], help_text()), (["--version"], version_text())):
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out == text + "\n"


def test_help_names_each_flag_once_with_its_default_in_80_columns():
    shown = help_text()
    for flags in groups().values():
        for flag in flags:
            assert len(re.findall(rf"^  --{flag.names[0]}\b(?!-)", shown, re.MULTILINE)) == 1, flag
    assert max(map(len, shown.splitlines())) <= 80
    assert "(default: 0.02)" in " ".join(shown.split())
    assert "--micro_batch_size" not in shown


def test_version_names_what_decides_the_numbers():
    assert re.fullmatch(
        r"megatron_ds \d\S*, torch \d\S*, deepspeed \d\S*, Python 3\.\S+", version_text()
    )


IMPORTS = """
import sys, runpy
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
try:
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
except SystemExit as ended:
    heavy = {"torch", "deepspeed", "transformers"} & set(sys.modules)
    print("ended", ended.code, sorted(heavy))
"""


@pytest.mark.parametrize(
    ("line", "code"), [("--help", 0), ("--version", 0), ("--num-layers two --fp17", 2)]
)
def test_help_and_argument_errors_import_neither_torch_nor_deepspeed(line, code):
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS, *line.split()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == f"ended {code} []"


if __name__ == "__main__":
    GOLDEN.write_text(flag_list())
