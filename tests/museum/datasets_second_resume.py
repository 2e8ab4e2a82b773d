"""Rows that a stream gives in three runs of four rows, each resumed from the one before."""

import copy

from datasets import Dataset
from frame import verdict

ROWS = list(range(12))


def run(state: dict | None) -> tuple[list[int], dict]:
    """The next four rows, and the state to continue from."""
    stream = Dataset.from_dict({"row": ROWS}).to_iterable_dataset(num_shards=2)
    if state is not None:
        stream.load_state_dict(state)
    rows = []
    for example in stream:
        rows.append(example["row"])
        if len(rows) == 4:
            break
    return rows, copy.deepcopy(stream.state_dict())


if __name__ == "__main__":
    state = None
    read = []
    for _ in range(3):
        rows, state = run(state)
        read.append(rows)
    verdict(
        [row for rows in read for row in rows] != ROWS, "rows " + ", then ".join(map(str, read))
    )
