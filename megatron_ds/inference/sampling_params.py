"""How tokens are drawn. Loads no torch, so that a command line can be checked at once."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from the logits."""

    greedy: bool = False
    """Take the most probable token; the rest has no effect."""
    temperature: float = 1.0
    """Logits are divided by this."""
    top_k: int = 0
    """Draw from the k most probable tokens; 0 is off."""
    top_p: float = 0.0
    """Draw from the fewest tokens that together have this probability; 0 is off."""
    seed: int = 1234
    top_p_decay: float = 0.0
    """Every new token multiplies top_p by this; 0 is off."""
    top_p_bound: float = 0.0
    """Below this top_p does not decay; 0 is off."""

    def after(self, new_tokens: int) -> SamplingParams:
        """How a token is chosen when a text already has this many new ones."""
        if not self.top_p_decay:
            return self
        decayed = self.top_p * self.top_p_decay**new_tokens
        # 0 would turn top-p off.
        top_p = max(decayed, self.top_p_bound, sys.float_info.min)
        return dataclasses.replace(self, top_p=top_p, top_p_decay=0.0)

    def problems(self) -> Iterator[str]:
        """Every contradiction, in the user's words."""
        if not 0.0 < self.temperature < float("inf"):
            yield (
                f"--temperature {self.temperature}: must be positive (--greedy takes the most "
                "probable token)"
            )
        if self.top_k < 0:
            yield f"--top-k {self.top_k}: must be positive, or 0 for off"
        if not 0.0 <= self.top_p <= 1.0:
            yield f"--top-p {self.top_p}: must lie between 0 (off) and 1"
        if not 0 <= self.seed < 2**63:
            yield f"--seed {self.seed}: must lie between 0 and 2^63 - 1"
        if self.greedy and (self.top_k or self.top_p or self.temperature != 1.0):
            yield "--greedy draws nothing: leave out --temperature, --top-k and --top-p"
