"""Options of profiles and of times in the log."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import folder_problems
from megatron_ds.config.fields import NON_ZERO, Condition, option_field, when
from megatron_ds.config.problems import Problem

_profile = functools.partial(option_field, only_with=when(profile=True))


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of steps, times of their parts and comparison of the ranks."""

    log_straggler: bool = option_field(
        False, only_with=Condition({"compile": (False,)}, without_flags=True)
    )
    straggler_minmax_count: int = option_field(1, minimum=1, only_with=when(log_straggler=True))
    profile: bool = option_field(False)
    profile_step_start: int = _profile(10, minimum=0)
    profile_step_end: int = _profile(12, minimum=1)
    profile_ranks: tuple[int, ...] = _profile((0,), nargs="*", minimum=0)
    profile_dir: str | None = _profile(None, metavar="FOLDER")
    timing_log_level: int = option_field(0, minimum=0, maximum=2)
    timing_log_option: str = option_field(
        "minmax", choices=("max", "minmax", "all"), only_with=when(timing_log_level=NON_ZERO)
    )

    @property
    def times_parts(self) -> bool:
        """Whether the step that ends a log interval is timed."""
        return self.timing_log_level > 0 or self.log_straggler

    def problems(self, world_size: int, *, has_folder: bool) -> Iterator[Problem]:
        """Settings that cannot be combined.

        Args:
            world_size: Number of processes.
            has_folder: Whether the run has a folder for checkpoints or for TensorBoard.
        """
        if not self.profile:
            return
        start, end = self.profile_step_start, self.profile_step_end
        if start >= end:
            yield Problem("profile-without-steps", start=start, end=end)
        if not self.profile_ranks:
            yield Problem("profile-without-ranks")
        elif (unknown := max(self.profile_ranks)) >= world_size:
            yield Problem("profile-of-unknown-rank", rank=unknown, last=world_size - 1)
        if self.profile_dir is None and not has_folder:
            yield Problem("profile-without-folder")
        yield from folder_problems("profile_dir", self.profile_dir)
