"""The models that are measured, and the limits of a device that their figures relate to."""

from __future__ import annotations

from dataclasses import dataclass

PEAK_TFLOPS = 989.0
"""Dense bf16 rate of an H100 or H200 (SXM) by its data sheet, in 10^12 operations per second."""


@dataclass(frozen=True)
class GptSize:
    """Shape of a GPT-2 and the micro-batches that are tried."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batches: tuple[int, ...]
    """In the order in which they are tried: the first that fits is measured."""
    goal: float | None = None
    """Tokens per second of one H200 in bf16 without dropout that the default command aims at."""
    vocab: int = 50257

    @property
    def parameters(self) -> int:
        """Parameters that multiply activations: all but the position table."""
        return 12 * self.layers * self.hidden**2 + self.vocab * self.hidden

    def mfu(self, tokens_per_second: float, peak_tflops: float) -> float:
        """Model FLOPs utilization, counting 6 N + 12 L S H operations per token."""
        flops = 6 * self.parameters + 12 * self.layers * self.sequence * self.hidden
        return flops * tokens_per_second / (peak_tflops * 1e12)


SIZES = {
    "tiny": GptSize(2, 64, 4, 32, (2,), vocab=257),
    "124m": GptSize(12, 768, 12, 1024, (64, 32, 16, 8), 470_000),
    "345m": GptSize(24, 1024, 16, 1024, (32, 16, 8, 4), 190_000),
    "345m-2048": GptSize(24, 1024, 16, 2048, (16, 8, 4, 2), 165_000),
    "1.3b": GptSize(24, 2048, 16, 2048, (16, 8, 4, 2), 54_000),
}
