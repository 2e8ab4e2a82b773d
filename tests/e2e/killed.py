"""pretrain_gpt.py, with a SIGKILL of all its ranks at a chosen moment. No test by itself.

    KILL_AT position:N    in the middle of the step whose micro-batch begins with sample N
    KILL_AT STAGE:N       while iteration N is being saved, at one of the stages of `STAGES`

The first rank to get there kills the process group, itself included.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def kill_all_ranks() -> NoReturn:
    sys.stdout.flush()
    os.killpg(os.getpgrp(), signal.SIGKILL)
    signal.pause()
    raise AssertionError("a process survived its SIGKILL")


def in_the_middle_of_a_step(position: int) -> None:
    """Before the forward pass of a micro-batch, with the gradients of earlier ones in place."""
    from megatron_ds.engine.zero import ZeroEngine

    forward = ZeroEngine._forward

    def counted(self: ZeroEngine, batch: Any) -> Any:
        if batch.position >= position:
            kill_all_ranks()
        return forward(self, batch)

    ZeroEngine._forward = counted  # type: ignore[method-assign]


def between_the_files(iteration: int) -> None:
    """One rank has not written its files."""
    from megatron_ds.engine.zero import ZeroEngine

    save = ZeroEngine.save

    def one_rank_only(self: ZeroEngine, folder: Path, tag: str) -> None:
        if f"global_step{iteration}" not in tag:
            save(self, folder, tag)
            return
        import torch.distributed as dist

        # DeepSpeed's own save is collective: the first rank writes what it alone would write.
        if dist.get_rank() == 0:
            (folder / tag / "mp_rank_00_model_states.pt").write_bytes(b"half of a file")
            kill_all_ranks()
        signal.pause()

    ZeroEngine.save = one_rank_only  # type: ignore[method-assign]


def before_writing(name: str) -> Callable[[int], None]:
    """A text file of the save that the crash prevents."""

    def install(iteration: int) -> None:
        from megatron_ds.checkpoint import storage

        write = storage.write_text

        def stopped(path: Path, text: str) -> None:
            saving = f"global_step{iteration}" in path.parent.name
            pointing = text in (str(iteration), f"global_step{iteration}")
            if path.name == name and (saving or pointing):
                kill_all_ranks()
            write(path, text)

        storage.write_text = stopped

    return install


def before_the_rename(iteration: int) -> None:
    """The manifest stands, the folder has its temporary name."""
    from megatron_ds.checkpoint import storage

    put = storage.publish

    def stopped(temporary: Path, target: Path) -> None:
        if target.name == f"global_step{iteration}":
            kill_all_ranks()
        put(temporary, target)

    storage.publish = stopped


STAGES: dict[str, Callable[[int], None]] = {
    "position": in_the_middle_of_a_step,
    "between_files": between_the_files,
    "before_run_facts": before_writing("run.json"),
    "before_manifest": before_writing("manifest.json"),
    "before_rename": before_the_rename,
    "before_pointers": before_writing("latest"),
    "between_pointers": before_writing("latest_checkpointed_iteration.txt"),
}


def main() -> None:
    stage, _, number = os.environ["KILL_AT"].partition(":")
    from megatron_ds.launch import environment

    environment.prepare_environment()
    STAGES[stage](int(number))
    import pretrain_gpt

    pretrain_gpt.main()


if __name__ == "__main__":
    main()
