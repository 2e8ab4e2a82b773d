"""Executes a script with stand-ins for the programs that it starts, which record their arguments.

The script itself is executed: what else it does, such as removing files, takes effect.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ds.cli.doctor.frameworks import tables
from megatron_ds.cli.doctor.shell import Reading

PATH = "/usr/local/bin:/usr/bin:/bin"
TIME_LIMIT_S = 60


def execute(words: Sequence[str], variables: Mapping[str, str]) -> Reading:
    """The programs that a script starts, and the files that they are told to read.

    Args:
        words: The script and its arguments.
        variables: Its environment, to which only PATH, HOME and the like are added.
    """
    reading = Reading()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("bin", "records", "work"):
            (folder / part).mkdir()
        stand_in = tables()["stand_in"]
        for program in stand_in["programs"].split():
            (folder / "bin" / program).write_text(stand_in["script"], "utf-8")
            (folder / "bin" / program).chmod(0o755)
        source = Path(words[0])
        for item in source.resolve().parent.iterdir() if source.is_file() else ():
            (folder / "work" / item.name).symlink_to(item)
        places = {"PATH": f"{folder}/bin:{PATH}", "DOCTOR_RECORDS": f"{folder}/records"}
        environment = {"HOME": name, "USER": "user", "TERM": "dumb", **variables, **places}
        script = [str(source.resolve()), *words[1:]]
        command = ["bash", *script] if source.is_file() else ["bash", "-c", " ".join(words)]
        try:
            subprocess.run(
                command,
                env=environment,
                cwd=folder / "work",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIME_LIMIT_S,
                check=True,
            )
        except subprocess.TimeoutExpired:
            reading.unread[words[0], "the script"] = f"did not end within {TIME_LIMIT_S} s"
        except subprocess.CalledProcessError as error:
            last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            reading.unread[words[0], "the script"] = f"ended with {error.returncode}: {last}"
        for record in sorted((folder / "records").iterdir()):
            arguments = record.read_text("utf-8", errors="replace").split("\0")[:-1]
            reading.started.append((arguments, words[0]))
            for each in (part for word in arguments for part in word.split("=", 1)):
                path = folder / "work" / each
                if each.endswith(".json") and path.is_file():
                    reading.files[each] = path.read_text("utf-8", errors="replace")
    return reading
