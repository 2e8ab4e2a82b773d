"""tools/doctor.py reads scripts and files of other trainers, and prints what they mean here."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from megatron_ds.cli import yaml_size
from megatron_ds.cli.arguments import build_config
from megatron_ds.cli.doctor import commands, frameworks, sandbox
from megatron_ds.cli.doctor.commands import read_source
from megatron_ds.cli.doctor.diagnosis import Diagnosis, diagnose, flags_of, joined
from megatron_ds.cli.doctor.frameworks import TrainingCommand
from megatron_ds.cli.doctor.shell import reading as doctor_reading
from megatron_ds.cli.doctor.shell.marks import unmarked
from megatron_ds.cli.doctor.shell.shell import Shell
from megatron_ds.cli.doctor.tiny import shrink
from megatron_ds.config import GROUP_OF_FIELD, Config
from megatron_ds.doctor import command as doctor
from tests.pages.flags import REPOSITORY
from tests.problems import codes, raises_problem
from tests.tables import tables

TABLES = tables(__file__)

LAUNCHERS = Path(__file__).parent.parent / "cli" / "launchers"


class Read(NamedTuple):
    """What is in a script of `LAUNCHERS`."""

    flags: str
    launcher: str
    world_size: int | None
    unread: Mapping[int, str] = MappingProxyType({})
    """By line a part of the text."""


SCRIPTS = {name: Read(**row) for name, row in TABLES["scripts"].items()}


def read(*words: object, **variables: str) -> TrainingCommand:
    (command,) = read_source([str(word) for word in words], variables, None)
    return command


def diagnosis_of(command: TrainingCommand, folder: Path) -> Diagnosis:
    return diagnose(command, doctor._complete, folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_a_shell_would_execute_it(name: str) -> None:
    expected = SCRIPTS[name]
    path = LAUNCHERS / name
    command = read(path)
    assert [*map(unmarked, command.flags)] == shlex.split(expected.flags)
    assert [*map(unmarked, command.launcher)] == shlex.split(expected.launcher)
    assert command.world_size == expected.world_size
    unread = command.reading.unread
    for line, part in expected.unread.items():
        assert any(each.startswith(f"{path}:{line}: ") and part in each for each in unread), line
    lines = {int(each.removeprefix(f"{path}:").partition(":")[0]) for each in unread}
    assert lines == expected.unread.keys()


def test_a_deepspeed_file_is_what_the_script_writes(tmp_path: Path) -> None:
    command = read(LAUNCHERS / "heredoc.slurm")
    found = diagnosis_of(command, tmp_path)
    assert found.lacking == []
    (content,) = command.reading.files.values()
    values = json.loads(content or "")
    assert values["train_micro_batch_size_per_gpu"] == 2
    assert found.checked.deepspeed_file is not None
    text = found.command_text()
    assert text.startswith("cat > \"./ds_config.$SLURM_JOB_ID.json\" <<'EOT'\n{\n")
    assert '--save "$SCRATCH/checkpoints/main"' in text
    assert "--node_rank $SLURM_PROCID pretrain_gpt.py" in text


def test_variables_and_arguments_of_a_script_can_be_given(tmp_path: Path) -> None:
    flags = read(LAUNCHERS / "arrays.sh", "checkpoints", "tokens", GPUS_PER_NODE="4").flags
    assert flags[-2:] == ["--save", "checkpoints"]
    assert flags[flags.index("--data-path") + 1] == "tokens"
    assert flags[flags.index("--global-batch-size") + 1] == "128"
    larger = read(LAUNCHERS / "defaults.sh", HL_NUM_NODES="2", HL_DP="4", HL_SEQ_LEN="8192")
    assert larger.world_size == 16
    assert "8192" in larger.flags
    with pytest.raises(Exception, match="starts no training program"):
        read(LAUNCHERS / "defaults.sh", HL_LLAMA_MODEL_SIZE="7")  # its `exit 1`


def test_a_number_that_only_the_script_knows_is_named(tmp_path: Path) -> None:
    found = diagnosis_of(read(LAUNCHERS / "unread.sh"), tmp_path)
    joined = diagnosis_of(read("torchrun pretrain_gpt.py --num-workers=$(nproc)"), tmp_path)
    for each in (found, joined):
        assert any(text.startswith("--num-workers $(nproc): ") for text in each.lacking)
        assert "--num-workers" not in each.command_text()
    assert any(each.endswith("unread.sh:19: $CHECKPOINT is not set; --set CHECKPOINT=VALUE sets it")
               for each in found.unread)  # fmt: skip


def test_an_argument_that_a_script_was_not_given_is_named_as_one(tmp_path: Path) -> None:
    script = tmp_path / "sweep.sh"
    script.write_text("torchrun pretrain_gpt.py --lr $1\n")
    (unset,) = diagnosis_of(read(script), tmp_path).unread
    assert "$1 is not set" in unset
    assert "--set" not in unset
    assert diagnosis_of(read(script, "1e-3"), tmp_path).unread == []


def test_scripts_that_call_scripts_and_commands_in_one_word(tmp_path: Path) -> None:
    inner = tmp_path / "inner.sh"
    inner.write_text('deepspeed pretrain_gpt.py --lr "$2" $EXTRA\n')
    outer = tmp_path / "outer.sh"
    outer.write_text("export EXTRA='--seed 3'\nsrun -N 2 bash inner.sh first 1e-4\n")
    assert read(outer).flags == ["--lr", "1e-4", "--seed", "3"]
    assert read(outer).place == "inner.sh:1"
    assert read("A=5; torchrun pretrain_gpt.py --seed $A").flags == ["--seed", "5"]
    appended = read('A=(1 2); A+=3; A+=("4 5"); torchrun pretrain_gpt.py "${A[@]}"')
    assert appended.flags == ["13", "2", "4 5"]
    loop = tmp_path / "loop.sh"
    loop.write_text(f"bash {loop}\ntorchrun pretrain_gpt.py --seed 1\n")
    assert "within each other" in read(loop).reading.unread[0]  # and ends


@pytest.mark.parametrize("name", TABLES["shell"])
def test_a_construct_of_the_shell_starts_what_bash_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bash itself is the reference, with programs that record their arguments."""
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", 60.0)
    case = TABLES["shell"][name]
    script = tmp_path / "run.sh"
    script.write_text(case["text"])
    words = [str(script), *case.get("arguments", "").split()]
    found, executed = (read_source(words, {}, None, executes=each) for each in (False, True))
    assert [each.flags for each in found] == [each.flags for each in executed]
    assert [" ".join(each.flags) for each in found] == case["flags"]
    assert [each.world_size for each in found] == case.get("world_sizes", [None] * len(found))
    unread = case.get("unread", [])
    assert len(found[0].reading.unread) == len(unread)
    for part, entry in zip(unread, found[0].reading.unread, strict=True):
        assert part in entry


@pytest.mark.parametrize("name", TABLES["of_files"])
def test_a_script_does_not_end_where_that_depends_on_files(name: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{TABLES['of_files'][name]}\ntorchrun pretrain_gpt.py --seed 1\n")
    command = read(script)
    assert command.flags == ["--seed", "1"]
    assert any("exit 3" in entry and "files" in entry for entry in command.reading.unread)


@pytest.mark.parametrize("executes", [False, True])
def test_the_line_at_which_reading_ended_is_named(executes: bool, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(TABLES["ended"])
    with raises_problem("doctor-no-command", contains=f"{script}:4: exit 3") as raised:
        read_source([str(script)], {}, None, executes=executes)
    assert 'if [ -z "$NAME" ]' in str(raised.problem)
    assert f"{script}:2: $(date)" in str(raised.problem)
    (command,) = read_source([str(script)], {"NAME": "x"}, None)
    assert command.flags == ["--name", "x"]


def test_comments_are_read_as_slurm_and_bash_read_them(tmp_path: Path) -> None:
    script = tmp_path / "run.slurm"
    script.write_text(TABLES["comments"]["text"])
    command = read(script)
    assert command.world_size == 8
    assert command.flags == TABLES["comments"]["flags"].split()
    unread = [entry.removeprefix(f"{script}:") for entry in command.reading.unread]
    assert [entry.partition(":")[0] for entry in unread] == ["5", "20", "19"]


@pytest.mark.parametrize("name", TABLES["too_large"])
def test_a_script_that_grows_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With low limits."""
    monkeypatch.setattr(doctor_reading, "MOST_CHARACTERS", 1000)
    monkeypatch.setattr(doctor_reading, "MOST_STEPS", 100)
    monkeypatch.setattr(doctor_reading, "MOST_NESTED", 20)
    monkeypatch.setattr(doctor_reading, "LARGEST_FILE", 400)
    monkeypatch.setattr(commands, "LARGEST_FILE", 400)
    script = tmp_path / "run.sh"
    script.write_text(TABLES["too_large"][name].replace("SELF", str(script)))
    with raises_problem("doctor-script-too-large", contains=str(script)):
        read_source([str(script)], {}, None)
    script.write_text("torchrun pretrain_gpt.py --seed 1\n")
    assert read(script).flags == ["--seed", "1"]


def test_files_that_are_not_regular_or_too_large_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_reading, "LARGEST_FILE", 400)
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "large").write_bytes(bytes(401))
    script = tmp_path / "run.sh"
    script.write_text(
        f"source {tmp_path}/pipe.sh\n. {tmp_path}/large\nA=$(cat large)\nB=$(cat /proc/version)\n"
        "torchrun pretrain_gpt.py --seed 1\n"
    )
    command = read(script)
    assert command.flags == ["--seed", "1"]
    assert len(command.reading.unread) == 4
    with raises_problem("doctor-file-unreadable"):
        read_source([str(tmp_path / "pipe.sh")], {}, None)


@pytest.mark.parametrize(
    "expression", ["9*" * 400 + "9", "-" * 999 + "1", "(" * 400 + "1" + ")" * 400]
)
def test_arithmetic_beyond_its_limits_is_not_read(expression: str) -> None:
    shell = Shell("x", {})
    shell.read(f"A=$(({expression}))\ntorchrun $A")
    assert shell.reading.started[0][1] == "x:2"


@pytest.mark.parametrize(
    "begin", ["$(", "${", "(", "A=(", '"$(', "<(", "`", "'", '"', "if ", "case "]
)
def test_a_script_that_ends_in_the_middle_of_a_construct_is_read(begin: str) -> None:
    shell = Shell("x", {})
    shell.read(f"torchrun pretrain_gpt.py --seed 1\n{begin * 301}")
    assert shell.reading.started[0] == (["torchrun", "pretrain_gpt.py", "--seed", "1"], "x:1")


def test_nothing_of_a_script_is_executed_unless_asked(
    tmp_path: Path, run_tool: Callable[..., Any]
) -> None:
    marker = tmp_path / "marker"
    script = tmp_path / "run.sh"
    script.write_text(
        f"touch {marker}\necho text > {tmp_path}/written\nX=$(touch {marker}; echo 3)\n"
        f"eval 'touch {marker}'\nfor seed in $(seq 5 5); do\n"
        "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --seed $seed\ndone\n"
        "srun -n 4 bash -c 'deepspeed pretrain_gpt.py --seed 6'\n"
    )
    printed = run_tool(doctor, script, status=1)
    assert {each.name for each in tmp_path.iterdir()} == {"run.sh"}
    assert f"{script}:5: for seed in $(seq 5 5)" in printed.err
    assert "--seed 6" in printed.out
    printed = run_tool(doctor, script, "--execute", status=1)
    assert marker.exists()
    assert re.findall(r"--seed \d", printed.out) == ["--seed 5", "--seed 6"]


def test_a_child_that_a_script_leaves_behind_does_not_hold_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has the standard error of the script, which ended."""
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", 3.0)
    script = tmp_path / "run.sh"
    script.write_text("sleep 300 &\ntorchrun pretrain_gpt.py --seed 7\nexit 0\n")
    (command,) = read_source([str(script)], {}, None, executes=True)
    assert command.flags == ["--seed", "7"]
    assert command.reading.unread == []  # the script itself has ended in time


def test_options_are_those_before_a_command_and_around_a_script(
    tmp_path: Path, run_tool: Callable[..., Any]
) -> None:
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-4 "
    flags += "--micro-batch-size 1 --train-iters 2 --data-path d --vocab-size 9 --tokenizer-type "
    command = shlex.split(f"deepspeed pretrain_gpt.py {flags} NullTokenizer")
    printed = run_tool(doctor, "--world-size", 6, *command)
    assert printed.err.startswith("command:1: 6 processes\n")
    assert printed.out.startswith("deepspeed pretrain_gpt.py \\\n    --num-layers 4 ")
    script = tmp_path / "run.sh"
    script.write_text(f"deepspeed pretrain_gpt.py {flags} $KIND\n")
    printed = run_tool(doctor, script, "--yaml", "--set", "KIND=NullTokenizer")
    assert "tokenizer-type: NullTokenizer\n" in printed.out
    for words, part in ((["no.sh"], "No such file"), ([], "name a script")):
        assert part in run_tool(doctor, *words, status=1).err


def test_the_example_of_the_documentation_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_tool: Callable[..., Any]
) -> None:
    page = Path(__file__).parents[3] / "docs" / "start" / "doctor.md"
    script, printed = re.findall(
        r"^```(?:bash)?\n((?:#!|train\.slurm).*?)^```",
        page.read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    monkeypatch.chdir(tmp_path)
    Path("train.slurm").write_text(script)
    found = run_tool(doctor, "train.slurm")
    assert found.err + found.out == printed


def test_differences_have_both_values(tmp_path: Path) -> None:
    flags = shlex.split(SCRIPTS["arrays.sh"].flags)
    file = tmp_path / "ds.json"
    file.write_text("{}")
    flags += ["--num-experts", "4", "--use-flash-attn", "--deepspeed_config", str(file)]
    command = TrainingCommand("x", [], flags, 16)
    found = "\n".join(diagnosis_of(command, tmp_path).differences)
    assert "--use-flash-attn has no effect" in found
    assert "without gradient_clipping in the DeepSpeed file" in found
    assert "so --clip-grad 0 here" in found
    assert "--expert-interval is not given: 2 there, 1 here" in found


@pytest.mark.parametrize("name", TABLES["unseen"])
def test_a_file_of_another_project_means_what_it_says(name: str, tmp_path: Path) -> None:
    """No key of a model is lost: it is in the command, or among what has no counterpart."""
    case = TABLES["unseen"][name]
    path = tmp_path / name
    path.write_text(case["text"])
    found = diagnosis_of(read(path), tmp_path)
    command = found.command_text().replace("\\\n", " ")
    for part in case["flags"]:
        assert f"{part} " in f"{command} ".replace("\n", " "), part
    for part in case["lacking"]:
        assert any(entry.startswith(part) for entry in found.lacking), part
    assert found.lacking or not case["lacking"]


def test_defaults_that_a_fork_implies_are_in_the_command(tmp_path: Path) -> None:
    """Our spelling of its flags would lose them: every layer would have experts."""
    line = "torchrun pretrain_gpt.py --num-layers 4 --num-experts 4 --topk 1 --use-tutel"
    found = diagnosis_of(read(line), tmp_path)
    assert "--expert-interval 2" in found.command_text()
    assert not any("--expert-interval is not given" in entry for entry in found.differences)
    again = diagnosis_of(read(found.command_text()), tmp_path)
    assert again.config.moe == found.config.moe


NEW = REPOSITORY.parent / "shared" / "reference" / "scripts" / "new5.json"
NEW_CASES = json.loads(NEW.read_text("utf-8")) if NEW.exists() else []


@pytest.mark.skipif(not NEW_CASES, reason=f"the command lines of users, {NEW.name}, are missing")
def test_commands_of_users_are_accepted_or_refused_for_what_they_have(tmp_path: Path) -> None:
    for case in NEW_CASES:
        words = [part.replace("@", "") for part in case["flags"]]
        launcher = f"torchrun --nproc_per_node {case['world']} pretrain_gpt.py"
        found = diagnosis_of(read(f"{launcher} {shlex.join(words)}"), tmp_path)
        problems = "\n".join(found.lacking)
        for word in case["says"]:
            assert word in problems, (case["id"], word)
        assert not [word for word in case["says_not"] if word in problems], case["id"]
        if case["expect"] == "accept":
            files = ("no such", "not there", "is not a folder", "does not exist")
            left = [each for each in found.lacking if not any(part in each for part in files)]
            assert left == [], case["id"]
            samples = case["facts"].get("samples_per_step")
            assert samples in (None, found.config.schedule.global_batch_size), case["id"]


def test_programs_with_other_losses_are_named(tmp_path: Path) -> None:
    command = read("torchrun pretrain_bert.py --num-layers 2")
    assert "pretrain_bert.py" in diagnosis_of(command, tmp_path).lacking[0]


PRIMUS_MODEL = TABLES["primus_model"]
LLAMA = TABLES["llama"]
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], str, str]] = TABLES["configurations"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_file_of_another_trainer_has_its_values_and_defaults(name: str, tmp_path: Path) -> None:
    text, values, unread, lacking = CONFIGURATIONS[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "llama.yaml").write_text(PRIMUS_MODEL)
    (tmp_path / "base.yaml").write_text("normalization: RMSNorm\nnum_layers: 5\n")
    (tmp_path / name).write_text(text.replace("FOLDER", f"{tmp_path}/model"))
    (command,) = read_source([str(tmp_path / name)], {}, 8)
    doctor._add_model(command)
    found = diagnosis_of(command, tmp_path)
    config = found.config
    assert {key: getattr(getattr(config, GROUP_OF_FIELD[key]), key) for key in values} == values
    assert any(unread in each for each in found.unread)
    assert any(each.startswith(lacking) for each in found.lacking), found.lacking
    unset = {"save_interval", "pipeline_model_parallel_size", "z_loss_coeff"}
    assert values.keys() - unset <= config.given


def test_a_value_that_a_file_leaves_out_stays_in_braces(tmp_path: Path) -> None:
    (tmp_path / "neox.yml").write_text("num_layers: 2\ntokenizer_type: HFTokenizer\n")
    flags = read(tmp_path / "neox.yml").flags
    assert flags[flags.index("--tokenizer-model") + 1] == "{vocab_file}"


@pytest.mark.parametrize(("name", "text", "reason"), TABLES["an_unreadable_file_is_an_error"])
def test_an_unreadable_file_is_an_error(
    name: str,
    text: str,
    reason: str,
    tmp_path: Path,
    run_tool: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a limit of ten keys and values."""
    monkeypatch.setattr(yaml_size, "MOST_VALUES", 10)
    (tmp_path / "llama.yaml").write_text("num_layers: 2\n")
    (tmp_path / name).write_text(text.replace("\\n", "\n"))
    printed = run_tool(doctor, tmp_path / name, status=1)
    assert f"{tmp_path / name}: " in printed.err
    assert reason in printed.err


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, pytest.param(10**309, id="large"), [1], {"a": 1}, "1", True],
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_value_of_a_file_ends_in_a_traceback(name: str, value: Any) -> None:
    trainer = {"titan": "torchtitan", "trainer": "huggingface"}.get(
        name.partition(".")[0], name.partition(".")[0]
    )
    table = frameworks.trainer_table(trainer)
    for key in {**table["defaults"], **table.get("flags", {})}:
        frameworks.translate_values(trainer, {key: value}, name, 8)


def spellings(flags: list[str], file: str, text: str) -> dict[str, str]:
    """Scripts that start a program with the same flags."""
    quoted = shlex.join(flags)
    in_quotes = re.sub(r'(["$`\\])', r"\\\1", quoted)
    values = [f"V{i}={shlex.quote(word)}\n" for i, word in enumerate(flags)]
    named = [f'"${{V{i}:-unused}}"' for i in range(len(flags))]
    elements = "".join(f"    {shlex.quote(word)}  # don't read this\n" for word in flags)
    body = re.sub(r"([$`\\])", r"\\\1", text)
    write = f"config={file}\ncat <<EOT > $config\n{body}\nEOT\n"
    return {
        "one line": f"{write}deepspeed pretrain_gpt.py {quoted}\n",
        "variables": f"{''.join(values)}{write}torchrun pretrain_gpt.py {' '.join(named)} \\\n"
        "   2>&1 | tee log\n",
        "array": f'{write}ARGS=(\n{elements})\ntorchrun pretrain_gpt.py "${{ARGS[@]}}"\n',
        "eval": f'{write}if [ -z "$UNSET" ]; then CMD="deepspeed pretrain_gpt.py {in_quotes}"; fi\n'
        'echo $CMD\neval "$CMD"\n',
        "bash -c": f"{write}export L=torchrun\nsrun -n 8 bash -c "
        + shlex.quote(f"$L --node_rank $SLURM_PROCID pretrain_gpt.py {quoted}"),
    }


def corpus(shared_data: Path) -> list[Any]:
    path = shared_data.parent / "reference" / "scripts" / "pretrain.json"
    if not path.is_file():
        pytest.skip("the command lines of other projects are missing")
    cases: list[Any] = json.loads(path.read_text("utf-8"))
    return cases


def test_command_lines_of_other_projects_are_read_in_every_spelling(
    shared_data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    for number, case in enumerate(corpus(shared_data)):
        flags = [flag.replace("@DS@", "ds.json") for flag in case["flags"]]
        text = json.dumps(case["ds"], indent=1)
        scripts = spellings(flags, "ds.json", text)
        for name in [*scripts] if number < 3 else [[*scripts][number % len(scripts)]]:
            path.write_text(scripts[name])
            command = read(path)
            assert command.flags == flags, (case["id"], name)
            assert command.reading.files["ds.json"] == f"{text}\n", (case["id"], name)


def test_the_printed_command_and_the_tiny_run_have_the_settings_of_the_original(
    shared_data: Path, tmp_path: Path
) -> None:
    for case in corpus(shared_data)[::2]:
        flags = [flag.replace("@DS@", "ds.json") for flag in case["flags"]]
        command = TrainingCommand("run.sh:1", [], flags, case["world"])
        command.reading.files["ds.json"] = json.dumps(case["ds"] or {})
        found = diagnosis_of(command, tmp_path)
        printed = joined(flags_of(found.config))
        warnings: list[str] = []
        again, _ = build_config(printed, world_size=found.world_size, warn=warnings.append)
        assert settings(again) == settings(found.config), case["id"]
        assert "ignored-flag" not in codes(warnings), case["id"]
        if found.lacking:
            continue
        words, processes = shrink(found.checked, found.world_size, tmp_path)
        _, problems = build_config(
            words, world_size=processes, warn=lambda _: None, complete=doctor._complete
        )
        assert problems == [], case["id"]
        assert processes <= 16


EXPERTS = TABLES["experts"]
CONTEXT = TABLES["context"]


def test_the_tiny_run_of_experts_has_their_parts(tmp_path: Path) -> None:
    found = diagnosis_of(TrainingCommand("run.sh:1", [], EXPERTS.split(), 16), tmp_path)
    words, processes = shrink(found.checked, found.world_size, tmp_path)
    config, problems = build_config(
        words, world_size=processes, warn=lambda _: None, complete=doctor._complete
    )
    assert [str(problem) for problem in problems] == []
    moe = config.moe
    model = config.model
    layers = config.model.num_layers
    assert [moe.has_experts(layer) for layer in range(layers)] == [True, False] * (layers // 2)
    assert (moe.experts, moe.moe_router_num_groups, moe.moe_router_enable_expert_bias) == (4, 2, 1)
    assert (model.multi_latent_attention, model.mtp_num_layers) == (True, 1)
    assert max(model.q_lora_rank or 0, model.kv_lora_rank, model.head_dim, model.v_head_dim) <= 64


@pytest.mark.parametrize(
    ("flags", "kinds", "sizes"),
    [
        ("", ("p2p",), (2, 1)),
        ("--cp-comm-type all_gather", ("all_gather",), (2, 1)),
        ("--cp-comm-type a2a", ("p2p",), (1, 2)),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            ("p2p",),
            (2, 2),
        ),
        ("--cp-comm-type p2p p2p a2a all_gather", ("p2p", "a2a"), (2, 1)),
        (
            "--cp-comm-type a2a+p2p a2a a2a a2a --hierarchical-context-parallel-sizes 4 2",
            ("a2a+p2p", "a2a"),
            (2, 1),
        ),
    ],
)
def test_the_tiny_run_exchanges_keys_as_the_original(
    flags: str, kinds: tuple[str, ...], sizes: tuple[int, int], tmp_path: Path
) -> None:
    original = f"{CONTEXT} {flags}".split()
    found = diagnosis_of(TrainingCommand("run.sh:1", [], original, 16), tmp_path)
    assert not found.lacking
    words, processes = shrink(found.checked, found.world_size, tmp_path)
    config, problems = build_config(
        words, world_size=processes, warn=lambda _: None, complete=doctor._complete
    )
    assert [str(problem) for problem in problems] == []
    parallel = config.parallel
    assert (parallel.cp_comm_type, parallel.cp_size, parallel.ulysses_size) == (kinds, *sizes)


def settings(config: Config) -> dict[str, Any]:
    """The values that are set, by field."""
    values = {name: getattr(getattr(config, GROUP_OF_FIELD[name]), name) for name in config.given}
    return {name: value for name, value in values.items() if value is not None}
