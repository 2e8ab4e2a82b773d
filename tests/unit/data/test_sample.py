"""Marks of tokens: which tokens end documents, and which have no loss as labels."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ds.data.sample import DocumentEnds, Mark, Samples

NO_LOSS = Mark.NO_LOSS.value
LAST = Mark.LAST.value
EOD = 9
IDS = [[9, 1, 9, 9], [1, 2, 3, 9]]
BY_FILE = [[0, LAST, 0, 0], [0, NO_LOSS | LAST, 0, 0]]
"""The file ends documents after 1 and 2; the token 2 has no loss."""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (DocumentEnds(EOD), [[LAST, 0, LAST, LAST], [0, NO_LOSS, 0, LAST]]),
        (
            DocumentEnds(EOD, masks_loss=True),
            [[LAST, NO_LOSS, LAST, NO_LOSS | LAST], [0, NO_LOSS, 0, LAST]],
        ),
        (DocumentEnds(None), BY_FILE),
        (
            DocumentEnds(None, masks_loss=True),
            [[0, LAST, NO_LOSS, 0], [0, NO_LOSS | LAST, NO_LOSS, 0]],
        ),
    ],
)
def test_documents_end_by_token_or_by_file(rule: DocumentEnds, expected: list[list[int]]) -> None:
    """The label of a document's last token is the first one of the next, and may have no loss."""
    samples = Samples(np.array(IDS, dtype=np.int32), np.array(BY_FILE, dtype=np.uint8))
    rule([0, 1], samples)
    assert samples.marks is not None
    assert samples.marks.tolist() == expected
    assert samples.marks.dtype == np.uint8
    assert samples.ids.tolist() == IDS
    written = np.bitwise_or.reduce(np.array(expected), axis=None)
    assert int(written) & ~(rule.marks.value | NO_LOSS) == 0
