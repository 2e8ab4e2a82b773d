"""What dropout keeps in a run: a program that records it on every rank, and the reference's replay.

Run as a program, this file runs pretrain_gpt.py and writes RECORDED_DROPOUT/RANK.pt: what each call
of torch's dropout and of its attention kernel with dropout keeps, in the order of the calls, except
in recomputation. The replay knows which dropouts the forward pass of a rank consists of, and fails
where one is missing, or is not expected. Imports nothing of the package.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLE = "RECORDED_DROPOUT"
SIGMAS = 6
"""Accepted deviation of the fraction that is dropped, in standard deviations."""
Masks = list[tuple[str, Tensor]]
"""Of each call "activation" [S, B, H] or "attention" [B, n, S, S], and what is kept."""


def record(found: Masks) -> None:
    """Replaces torch's functions by ones that record, too."""
    drop = functional.dropout
    attend = functional.scaled_dot_product_attention

    def is_recorded(probability: float) -> bool:
        return probability > 0.0 and torch._C._current_graph_task_id() == -1

    def recording_drop(x: Tensor, p: float = 0.5, *more: Any, **options: Any) -> Tensor:
        if is_recorded(p):
            state = torch.get_rng_state()
            found.append(("activation", drop(torch.ones_like(x), p, *more, **options) != 0))
            torch.set_rng_state(state)
        return drop(x, p, *more, **options)

    def recording_attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any = None,
        p: float = 0.0,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        if is_recorded(p):
            state = torch.get_rng_state()
            # With unit vectors as values, the output is the weights of the softmax.
            units = torch.eye(k.shape[2], dtype=v.dtype).expand(*k.shape[:2], -1, -1)
            with torch.no_grad():
                kept = attend(q, k, units, mask, p, *more, **options) != 0
            found.append(("attention", kept))
            torch.set_rng_state(state)
        return attend(q, k, v, mask, p, *more, **options)

    functional.dropout = recording_drop
    functional.scaled_dot_product_attention = recording_attend


class Replay:
    """The recorded masks, as the `dropouts` of a reference training.

    Micro-batch m of a step is the (m // DP)-th of data-parallel rank m % DP. Ranks are ordered
    (pipeline, data, tensor), tensor fastest; every stage has equally many layers.

    Args:
        folder: Where the ranks have written their masks.
        layers: Layers of the model.
        rates: Dropout probability by kind.
    """

    def __init__(
        self, folder: Path, layers: int, rates: dict[str, float], *, tp: int, pp: int, dp: int
    ) -> None:
        self._rates = rates
        self._tp = tp
        self._dp = dp
        self._per_stage = layers // pp
        self._queues = [deque[Any](torch.load(folder / f"{r}.pt")) for r in range(tp * pp * dp)]
        self._seen: set[bytes] = set()
        self._counts = dict.fromkeys(rates, (0, 0))

    def dropouts(self, step: int, micro_batch: int) -> Callable[[Tensor, str], Tensor]:
        attention: list[Tensor] = []

        def drop(x: Tensor, place: str) -> Tensor:
            stage = 0 if place == "embedding" else int(place.split(".")[1]) // self._per_stage
            head = place.rpartition(".")[2]
            if not head.isdigit():
                masks = self._next("activation", stage, micro_batch, place)
                assert all(torch.equal(mask, masks[0]) for mask in masks), place
                return self._apply(x, masks[0].transpose(0, 1), "activation", x != 0)
            if head == "0":
                attention[:] = [
                    torch.cat(self._next("attention", stage, micro_batch, place), dim=1)
                ]
            return self._apply(x, attention[0][:, int(head)], "attention", x != 0)

        return drop

    def problems(self) -> list[str]:
        """What is wrong with the masks themselves, after the training."""
        found = [f"rank {r} drops {len(q)} times more" for r, q in enumerate(self._queues) if q]
        for kind, (dropped, possible) in self._counts.items():
            rate = self._rates[kind]
            if abs(dropped - rate * possible) > SIGMAS * (possible * rate * (1 - rate)) ** 0.5:
                found.append(f"{kind}: dropped {dropped} of {possible}")
        return found

    def _next(self, kind: str, stage: int, micro_batch: int, place: str) -> list[Tensor]:
        """The masks of the tensor-parallel ranks."""
        first = (stage * self._dp + micro_batch % self._dp) * self._tp
        masks = []
        for queue in list(self._queues)[first : first + self._tp]:
            found, mask = queue.popleft() if queue else ("no more", torch.empty(0))
            assert found == kind, f"{place} has no dropout: {found} follows"
            masks.append(mask)
        for mask in masks if kind == "attention" else masks[:1]:
            assert mask.numpy().tobytes() not in self._seen, f"{place} repeats a mask"
            self._seen.add(mask.numpy().tobytes())
        return masks

    def _apply(self, x: Tensor, kept: Tensor, kind: str, counted: Tensor) -> Tensor:
        dropped, possible = self._counts[kind]
        dropped += int((counted & ~kept).sum())
        self._counts[kind] = dropped, possible + int(counted.sum())
        return x * kept / (1 - self._rates[kind])


def main() -> None:
    masks: Masks = []
    record(masks)
    try:
        runpy.run_path(str(REPOSITORY / "pretrain_gpt.py"), run_name="__main__")
    finally:
        torch.save(masks, Path(os.environ[VARIABLE]) / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main()
