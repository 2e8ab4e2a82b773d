"""Links, commands, named tests and the map of the code in the documentation resolve."""

from __future__ import annotations

import ast
import doctest
import fnmatch
import functools
import re
import shlex
import shutil
from pathlib import Path

import pytest

from megatron_ds.cli.arguments import build_config, parse
from megatron_ds.cli.flags import dashed, training_flags
from megatron_ds.cli.scan import scan
from megatron_ds.config import ModelConfig, MoEConfig, flag_of
from megatron_ds.config.problems import Problem, catalogue
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.huggingface.families import FAMILIES
from megatron_ds.conversion.huggingface.read_config import settings_of
from megatron_ds.conversion.huggingface.standard_values import standard_values
from tests.import_graph import nodes, sources, tree
from tests.pages.flags import tool_tables
from tests.pages.verified import SECTIONS, claims_in, tier
from tests.problems import codes
from tests.proofs.marked import Marked

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/results/*.md")
    for page in REPOSITORY.glob(pattern)
)
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = DOCS / "development" / "architecture.md"
MIGRATION = DOCS / "start" / "migration.md"
OTHERS_FLAGS = set(
    re.findall(
        r"\S+",
        "num-gpus hostfile no-ssh launcher launcher-args ntasks-per-node node-rank nnodes "
        "nproc-per-node master-addr master-port bind-to nodes gpus-per-node gpus-per-task "
        "cpus-per-task time wait pid pty signal shm-size ipc json-key vocab override- "
        "include exclude num-nodes force-multi rdzv-backend array norm-target-loss fim-rate bitfit "
        "multi-latent-attention use-fused-sdpa attention-head-type data-file-list",
    )
)
"""Flags of launchers and of other frameworks that the pages name."""
TROUBLESHOOTING = DOCS / "start" / "troubleshooting.md"
MODEL = DOCS / "training" / "model.md"
OPTIONS_OF_MODEL = {**ModelConfig.__dataclass_fields__, **MoEConfig.__dataclass_fields__}
PARTS_OF_MODEL = ("position_embedding_type", "normalization", "activation")
"""Options of which every choice has a row in the page of the model."""
PARTS_OF_FAMILIES = (
    "gelu_kind",
    "add_bias_linear",
    "qkv_bias",
    "embed_layernorm",
    "norm_epsilon",
    "rotary_percent",
    "untie_embeddings_and_output_weights",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "norm_position",
    "parallel_residual",
    "apply_layernorm_1p",
    "qk_layernorm",
    "qk_layernorm_scope",
    "softmax_type",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "rotary_scaling_factor",
    "yarn_correction_range_round_to_int",
    "no_rope_freq",
    "rotary_interleaved",
)
SMALL_CONFIG = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 4),
    "vocab_size": 8,
    "rotary_dim": None,
}
"""Keys of a config.json that have no default, or one that exceeds these sizes."""
PAGES_WITH_FLAGS = (
    "start/tutorial",
    "start/choose_a_layout",
    "start/finetuning",
    "start/troubleshooting",
    "start/migration",
    "running/launching",
    "training/model",
)
OTHERS_TOOLS = {"tools/merge_preprocessed_data.py"}
"""Scripts of other frameworks that the pages mention."""


def test_links_resolve() -> None:
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link
    ]

    assert [(page.name, link) for page, link in links if not resolves(page, link)] == []


def test_the_first_line_of_a_page_says_whom_it_is_for() -> None:
    first = {page: page.read_text(encoding="utf-8").split("\n\n")[1] for page in PAGES}
    assert len(first) > 100
    assert [page.name for page, line in first.items() if not line.startswith("For ")] == []


def test_pages_begin_with_a_title_and_have_short_lines() -> None:
    """Lines of tables and examples may be long."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert re.match(r"# .+\n\n\w", text), page.name
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
        long = [line for line in prose if len(line) > 125 and not line.startswith(("|", "    "))]
        assert [line for line in long if not line.startswith(("![", "* "))] == [], page.name


def test_the_page_for_agents_is_short() -> None:
    assert len((REPOSITORY / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_pages_named_in_code_exist() -> None:
    """In docstrings, comments, messages and help texts."""
    folders = ("megatron_ds", "tools", "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.*")]
    named = {
        (path.name, page)
        for path in files
        if path.suffix in (".py", ".toml", ".yaml", ".sh")
        for page in re.findall(r"(?<![\w./])docs/[\w/]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert [(name, page) for name, page in named if not (REPOSITORY / page).is_file()] == []


def test_pictures_are_small() -> None:
    """`python -m tests.pages.screenshots` writes those of a browser."""
    pictures = sorted((DOCS / "images").glob("*.png"))
    assert {"report.png", "server.png"} <= {path.name for path in pictures}
    assert [path.name for path in pictures if path.stat().st_size > 150_000] == []


def resolves(page: Path, link: str) -> bool:
    """Whether the file of a link and the heading in it exist."""
    name, _, heading = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not heading or not target.exists():
        return target.exists()
    titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    """Names of the tests that pytest collects from a file; empty if it does not collect it."""
    if not fnmatch.fnmatch(path.name, "test_*.py"):
        return set()
    return {
        node.name
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


def test_each_claim_has_one_section_and_its_test() -> None:
    claims = [row for path in (REPOSITORY / "tests").rglob("test_*.py") for row in claims_in(path)]
    sections = {(text, section) for section, text, _ in claims}
    assert len(sections) > 300
    assert len(dict(sections)) == len(sections)
    assert {section for _, section in sections} == set(SECTIONS)


def test_claims_are_paragraphs_of_the_docstrings_of_a_file_and_its_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    tests = 'def test_a(): ...\ndef test_b():\n    """Claim (data): of\n    b"""\n'
    path.write_text(f'"""Of a file.\n\nClaim (serving): of all\n"""\n{tests}')
    of_file = ("serving", "of all", ["test_a", "test_b"])
    of_test = ("data", "of b", ["test_b"])
    assert list(claims_in(path)) == [of_file, of_test]
    other = tmp_path / "test_y.py"
    other.write_text(tests.replace("(data)", "(date)"))
    with pytest.raises(KeyError, match="no section date"):
        list(claims_in(other))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([None, "proof"], "test"),
        (["proof", "proof"], "proofs"),
        (["interop"], "interop"),
        (["proof", "interop"], "proofs"),
    ],
)
def test_the_tier_of_a_claim_is_the_nearest_of_its_tests(
    marks: list[str | None], expected: str
) -> None:
    tests = [f"tests/unit/test_{number}.py::test" for number in range(len(marks))]
    found = {test: Marked(mark, True) for test, mark in zip(tests, marks, strict=True) if mark}
    assert tier(tests, found) == expected
    assert tier(["tests/cluster/test_x.py::test"], {}) == "cluster"
    assert tier(tests[:1], {tests[0]: Marked("proof", False)}) == "test"


def test_files_and_tests_in_backquotes_exist() -> None:
    """Paths below the folders of this repository, and the tests after their `::`."""
    pattern = (
        r"`((?:megatron_ds|tools|tests|benchmarks|docs|examples|ds_configs)/[\w./-]*)(?:::(\w+))?`"
    )
    assert [
        (page.name, path, name)
        for page in PAGES
        for path, name in re.findall(pattern, page.read_text(encoding="utf-8"))
        if path not in OTHERS_TOOLS
        if not (REPOSITORY / path).exists()
        or (name and name not in names_of_tests(REPOSITORY / path))
    ] == []


def test_worked_examples_give_what_they_show() -> None:
    page = DOCS / "development" / "how_resharding_works.md"

    assert doctest.testfile(str(page), module_relative=False) == (0, 8)


def test_codes_of_the_troubleshooting_page_exist() -> None:
    rows = re.findall(r"^\|.*\|([^|]*)\|$", TROUBLESHOOTING.read_text("utf-8"), re.MULTILINE)
    named = {code for cell in rows for code in re.findall(r"`([\w-]+)`", cell)}
    assert len(named) > 20
    assert named <= catalogue().keys()


def test_command_line_of_the_forks_parses() -> None:
    text = MIGRATION.read_text(encoding="utf-8")
    (command,) = re.findall(r"```\n(deepspeed .*?)```", text, flags=re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    warnings: list[Problem] = []

    _, problems = build_config(
        words[words.index("pretrain_gpt.py") + 1 :], world_size=8, warn=warnings.append
    )

    assert [str(line).split()[0] for line in warnings] == ["--use-flash-attn-v2"]
    assert set(codes(problems)) == {"file-not-found"}


def test_flags_named_in_the_pages_are_those_of_a_program_or_a_launcher() -> None:
    tables = (training_flags(), *tool_tables().values())
    known = {"help", "help-all"}.union(*(table.by_name for table in tables), OTHERS_FLAGS)
    assert [
        (name, flag)
        for name in PAGES_WITH_FLAGS
        for flag in re.findall(
            r"(?<![\w-])--[a-z][\w-]*", (DOCS / f"{name}.md").read_text(encoding="utf-8")
        )
        if dashed(flag) not in known
    ] == []


def test_the_page_of_the_model_has_every_option_and_choice() -> None:
    text = MODEL.read_text(encoding="utf-8")
    options = [flag for flag in training_flags().own if flag.field in OPTIONS_OF_MODEL]
    flags = [flag for flag in options if flag.label == flag_of(flag.field)]
    assert len(flags) > 30
    named = set(re.findall(r"--[\w-]+", text))
    assert {flag.label for flag in flags} - named == set()
    rows = [
        f"`{flag.label} {value}`"
        for flag in flags
        if flag.field in PARTS_OF_MODEL
        for value in flag.choices or ()
    ]
    assert [row for row in rows if row not in text] == []
    sizes = dict(re.findall(r"^\| `(--[\w-]+)` \| .* \| ([^|]*) \|$", text, re.MULTILINE))
    required = {flag.label for flag in flags if flag.required}
    assert {flag for flag, default in sizes.items() if default == "required"} == required


def test_the_families_of_the_model_page_have_the_flags_that_conversion_reads() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(--.*)` \|$", MODEL.read_text("utf-8"), re.MULTILINE)
    assert [family for family, _ in rows] == list(FAMILIES)
    for name, flags in rows:
        family = FAMILIES[name]
        values = standard_values({**SMALL_CONFIG, "model_type": name}, family)
        read = settings_of(family.rows, ConfigValues(Path(), values)).model
        config, _ = build_config(
            shlex.split(flags), world_size=1, warn=lambda text: pytest.fail(str(text))
        )
        parts = [
            {part: getattr(model, part) for part in (*PARTS_OF_MODEL, *PARTS_OF_FAMILIES)}
            for model in (config.model, read)
        ]
        assert parts[0] == parts[1], name


PAGE_COMMAND = re.compile(r"(?<![\w/.])(pretrain_gpt\.py|(?:tools|tasks)/[\w/]+\.py) (.*)")

NO_ARGUMENTS = re.compile(r"(^| )(\.\.\.|\$\(cat .*?\)|(FLAGS|[>|]) .*)")


def page_commands() -> list[tuple[str, str, list[str]]]:
    """Page, program and arguments of the commands in the blocks of all pages, without `...`."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = "".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
        lines += re.findall(r"^    (.*)", text, re.MULTILINE)
        for match in filter(None, map(PAGE_COMMAND.search, lines)):
            arguments = NO_ARGUMENTS.sub(" ", match[2])
            if arguments.count('"') % 2:  # of --wrap "python ..."
                arguments = arguments.rstrip('")')
            found.append((page.name, match[1], shlex.split(arguments, comments=True)))
    return found


def test_commands_of_all_pages_have_valid_flags_and_values() -> None:
    """`tests/commands/test_fresh_clone.py` runs those that need nothing else."""
    tables = {"pretrain_gpt.py": training_flags(), **tool_tables()}
    tables["tasks/main.py"] = tables["tools/evaluate.py"]
    wrong = []
    programs = set()
    for page, program, arguments in page_commands():
        name = f"{program} {arguments[0]}" if arguments else program
        words = arguments[1:] if name in tables else arguments
        table = tables[name if name in tables else program]
        line = scan(words, table, keep_unknown=program != "pretrain_gpt.py")
        others = scan(line.unknown, tables["pretrain_gpt.py"]) if line.unknown else line
        wrong += [(page, program, str(each)) for each in (*line.problems, *others.problems)]
        programs.add(program)
    assert wrong == []
    assert len(programs) > 15


def test_the_code_map_lists_every_folder() -> None:
    folders = {path.parent.name for path in (REPOSITORY / "megatron_ds").glob("*/__init__.py")}
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)/` \|.*\|([^|]*)\|$", text, flags=re.MULTILINE)

    assert {folder for folder, _ in rows} == folders
    for folder, start in rows:
        for file in re.findall(r"`(.+?)`", start):
            assert (REPOSITORY / "megatron_ds" / folder / file).is_file(), file


def test_the_page_of_accelerators_lists_what_is_asked_of_one() -> None:
    """Claim (accelerators): [Accelerators](../running/accelerators.md) lists the methods of
    DeepSpeed's accelerator that the package calls"""
    objects = {"accelerator", "get_accelerator()", "self._accelerator"}
    asked = {
        node.attr
        for path in sources()
        if "accelerator" in path.read_text(encoding="utf-8")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in objects
    }
    page = (DOCS / "running" / "accelerators.md").read_text(encoding="utf-8")
    _, _, table = page.partition("methods of DeepSpeed's accelerator |")
    rows = re.findall(r"^\|.*\|([^|]*)\|$", table.partition("\n\n")[0], re.MULTILINE)
    listed = [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(asked - {"type"})  # of torch's accelerator


def commands() -> list[list[str]]:
    blocks = re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = {words[1] for words in commands() if words[:1] == ["make"]}

    assert targets == {"demo", "test", "quick"}
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert "test-interop" in named
    for target in targets | named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_training_command_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/my_text_document.bin", "data/my_text_document.idx", "tokenizer/vocab.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tokenizer" / "merges.txt").touch()
    shutil.copy(REPOSITORY / "ds_configs" / "zero1.json", tmp_path / "ds_config.json")
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in commands() if "--num-layers" in words]

    config = parse(words[words.index("pretrain_gpt.py") + 1 :], world_size=1)

    assert config.optimizer.lr == 3e-4
    assert config.given >= {"train_iters", "deepspeed_config"}
