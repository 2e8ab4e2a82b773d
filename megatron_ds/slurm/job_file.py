"""The file with which sbatch starts a run: pretrain_gpt.sbatch with the settings of the run."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.config.problems import user_error
from megatron_ds.programs import REPOSITORY, is_installed, start_words
from megatron_ds.slurm.options import Submit
from megatron_ds.slurm.records import OUTPUT

TEMPLATE = Path(__file__).with_name("pretrain_gpt.sbatch")
FILE = "slurm.sbatch"
"""The job's file, in the folder of the run."""
NEXT_LINE = " \\\n    "


def job_file(options: Submit, counts: Sequence[int], flags: Sequence[str]) -> str:
    """The file for sbatch.

    Args:
        options: The job.
        counts: Numbers of nodes on which the run can train, the largest first.
        flags: Flags of the run.
    """
    run = Path(os.path.abspath(options.run))
    gpus = options.ranks_per_node if options.gpus_per_node is None else options.gpus_per_node
    values = {
        "job-name": run.name,
        "nodes": options.nodes,
        # With a number of tasks, Slurm would not start the job again on fewer nodes.
        "mincpus": options.ranks_per_node * options.cpus_per_rank,
        "gpus-per-node": gpus,
        "time": options.time,
        "signal": f"TERM@{options.signal_seconds}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": str(run / OUTPUT).replace("%", "%%"),
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in values.items() if value]
    variables = {
        **_programs(options.program),
        "python": shlex.quote(sys.executable),
        "ranks": str(options.ranks_per_node),
        "node_counts": shlex.quote(" ".join(map(str, counts))),
    }
    again = f"sbatch {shlex.quote(str(run / FILE))}"
    words = "".join(
        f"{NEXT_LINE if word.startswith('--') else ' '}{shlex.quote(word)}" for word in flags
    )
    comments = [again, *lines, "requeue", *options.sbatch]
    if broken := [line for line in comments if re.search(r"[\x00-\x1f\x7f]", line)]:
        raise user_error("job-file-control-character", text=repr(broken[0]))
    return "".join(
        [
            "#!/bin/bash\n",
            f"# Written by tools/slurm.py submit; once more: {again}\n",
            *(f"#SBATCH --{line}\n" for line in comments[1:]),
            "\n",
            *(f"{name}={value}\n" for name, value in variables.items()),
            f"set --{words}\n\n",
            Path(options.template or TEMPLATE).read_text(encoding="utf-8").partition("\n\n")[2],
        ]
    )


def _programs(script: str | None) -> dict[str, str]:
    """Variables of the job's file with the words that start the run, and queue the job again.

    Args:
        script: Program of the run, if it is not the package's own.
    """
    train = start_words("train") if script is None else [os.path.abspath(script)]
    if is_installed():
        return {
            name: f"({shlex.join(words)})"
            for name, words in (("program", train), ("slurm", start_words("slurm")))
        }
    return {"repository": shlex.quote(str(REPOSITORY)), "program": shlex.join(train)}
