"""Trains with a logger that writes a CSV file, which a spreadsheet opens.

torchrun --nproc_per_node 8 examples/extend/logger.py FLAGS OF pretrain_gpt.py
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.extend import Config, Extensions, Logger, StepRecord, TrainState, pretrain

COLUMNS = ("iteration", "lm_loss", "learning_rate", "tokens_per_second")


class CsvLogger(Logger):
    """Writes steps.csv in --save. It is opened on one rank, the last one."""

    def __init__(self, config: Config, state: TrainState) -> None:
        assert config.checkpoint.save is not None, "--save has the file"
        path = Path(config.checkpoint.save) / "steps.csv"
        kept = []
        if path.exists():  # a resumed run repeats the steps after its checkpoint
            rows = list(csv.reader(path.open(newline="")))[1:]
            kept = [row for row in rows if int(row[0]) <= state.iteration]
        self.file = path.open("w", newline="", buffering=1)
        csv.writer(self.file).writerows([COLUMNS, *kept])

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        rows = [[getattr(record, name) for name in COLUMNS] for record in records]
        csv.writer(self.file).writerows(rows)

    def close(self) -> None:
        self.file.close()


if __name__ == "__main__":
    pretrain(Extensions(loggers=[CsvLogger]))
