"""How tokens are drawn. Loads no torch, so that a command line can be checked at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
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
