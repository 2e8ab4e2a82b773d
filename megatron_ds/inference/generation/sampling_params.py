"""Sampling parameters. Loads no torch, so that a command line can be checked immediately."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import field_problems, option_field
from megatron_ds.config.problems import Problem


@dataclass(frozen=True)
class CandidateOptions:
    """Options that select the candidates for the next token."""

    temperature: float = option_field(1.0, above=0)
    """Sampling temperature; values below 1 favor probable tokens."""
    top_k: int = option_field(0, minimum=0)
    """Sample from the N most probable tokens; 0 disables."""
    top_p: float = option_field(0.0, minimum=0, maximum=1)
    """Sample from the smallest set of tokens with at least this total probability; 0 disables."""


@dataclass(frozen=True)
class SamplingParams(CandidateOptions):
    """Settings for sampling the next token from the logits."""

    greedy: bool = option_field(False)
    """Select the most probable token instead of sampling."""
    seed: int = option_field(1234, minimum=0, below=2**63)
    """Random seed of sampling."""
    top_p_decay: float = 0.0
    """Factor of top_p for every new token; 0 is off."""
    top_p_bound: float = 0.0
    """Smallest decayed top_p; 0 is off."""

    def after(self, new_tokens: int) -> SamplingParams:
        """The parameters for a text that already has this many new tokens."""
        if not self.top_p_decay:
            return self
        decayed = self.top_p * self.top_p_decay**new_tokens
        # 0 would turn top-p off.
        top_p = max(decayed, self.top_p_bound, sys.float_info.min)
        return dataclasses.replace(self, top_p=top_p, top_p_decay=0.0)

    def problems(self) -> Iterator[Problem]:
        yield from field_problems(self)
