"""Executes a script with stand-ins for the programs that it starts, which record their arguments.

The script itself is executed: what else it does, such as removing files, takes effect.
"""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

from megatron_ds.cli.doctor.frameworks import tables
from megatron_ds.cli.doctor.shell.reading import Reading

TIME_LIMIT_S = 60.0


def execute(words: Sequence[str], variables: Mapping[str, str]) -> Reading:
    """The programs that a script starts, and the files that they are given to read.

    Args:
        words: The script and its arguments.
        variables: Its environment, to which only PATH, HOME and the like are added.
    """
    reading = Reading()
    source = Path(words[0]).resolve()
    stand_in = tables()["stand_in"]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, part) for part in ("bin", "records", "work")]
        bin_, records, work = folders
        for folder in folders:
            folder.mkdir()
        for program in stand_in["programs"].split():
            (bin_ / program).write_text(stand_in["script"], "utf-8")
            (bin_ / program).chmod(0o755)
        for item in source.parent.iterdir() if source.is_file() else ():
            (work / item.name).symlink_to(item)
        places = {"PATH": f"{bin_}:{stand_in['path']}", "DOCTOR_RECORDS": str(records)}
        environment = {"HOME": name, "USER": "user", "TERM": "dumb", **variables, **places}
        text = words[0] if len(words) == 1 else shlex.join(words)
        script = [str(source), *words[1:]] if source.is_file() else ["-c", text]
        command = ["bash", "-c", 'exec bash "$@" </dev/null >/dev/null', "bash", *script]
        process = Popen(command, env=environment, cwd=work, stderr=PIPE, start_new_session=True)
        ended = ""
        try:
            errors = process.communicate(timeout=TIME_LIMIT_S)[1].decode(errors="replace")
            last = errors.strip().rpartition("\n")[2]
            ended = f"ended with {process.returncode}: {last}" if process.returncode else ""
        except TimeoutExpired:  # what it has left in the background may hold the pipe
            ended = f"did not end within {TIME_LIMIT_S:g} s" if process.poll() is None else ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        reading.unread += [f"{words[0]}: the script {ended}"] * bool(ended)
        for record in sorted(records.iterdir()):
            arguments = record.read_text("utf-8", errors="replace").split("\0")[:-1]
            reading.started.append((arguments, words[0]))
            for piece in (part for word in arguments for part in word.split("=", 1)):
                if piece.endswith(".json") and (work / piece).is_file():
                    reading.files[piece] = (work / piece).read_text("utf-8", errors="replace")
    return reading
