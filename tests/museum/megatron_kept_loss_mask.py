"""Loss masks of samples without a padding token, read after a sample that has one."""

import tempfile
from pathlib import Path

from frame import verdict
from helpers import megatron

PAD = 7
DOCUMENTS = [[1, 2, 3, 4, 5], [1, PAD, 3, 4, 5], *[[1, 2, 3, 4, 5]] * 6]
"""One of the samples of four tokens has the padding token as a label."""
SAMPLES = 8


def masked(order: list[int]) -> dict[int, int]:
    """Sample -> positions that do not count, of samples that are read in an order."""
    with tempfile.TemporaryDirectory() as folder:
        samples = megatron.samples(Path(folder), DOCUMENTS, length=4, pad=PAD)
        return {index: samples[index]["loss_mask"].tolist().count(0) for index in order}


if __name__ == "__main__":
    alone = {index: masked([index])[index] for index in range(SAMPLES)}
    (padded,) = (index for index, count in alone.items() if count) if any(alone.values()) else (0,)
    others = [index for index in range(SAMPLES) if index != padded]
    as_first = masked([padded, *others])
    as_second = masked([others[0], padded, *others[1:]])
    wrong = [sum(bool(counts[i]) for i in others) for counts in (as_first, as_second)]
    figures = f"{wrong[0]} of {len(others)} other samples lose a token after it is read first"
    verdict(any(wrong), f"{figures}, {wrong[1]} after it is read second")
