#!/usr/bin/env bash
# One would guess: litdata stores each tensor with its type, as the items may be any Python objects, or
#        refuses an item whose type differs from the first.
# True:  litdata 0.2.76 writes each one-dimensional tensor or array as it is, without a word, and keeps the type
#        of the first item alone. Later items are read as that type: int64 tokens after int32 ones come
#        back twice as long with a zero after each token; uint16 ones after int32 ones half as long,
#        with two tokens in each number.
# Hurt:  whoever tokenizes with functions that do not always give one type (torch.tensor of a list is int64,
#        a loaded file int32 or uint16): false tokens, found only by looking at them.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 litdata==0.2.76
"$work/env/bin/python" -W ignore - "$work" <<'PY'
import sys
import litdata, numpy as np, torch
from litdata.streaming.writer import BinaryWriter

tokens = [5, 6, 7, 8]
cases = {
    "torch int32, then int64": (torch.tensor(tokens, dtype=torch.int32), torch.tensor(tokens)),
    "torch int64, then int32": (torch.tensor(tokens), torch.tensor(tokens, dtype=torch.int32)),
    "numpy int32, then uint16": (np.array(tokens, np.int32), np.array(tokens, np.uint16)),
}
print("litdata", litdata.__version__, "tokens of both items", tokens)
second = []
for number, (name, items) in enumerate(cases.items()):
    folder = f"{sys.argv[1]}/{number}"
    writer = BinaryWriter(folder, chunk_bytes="1MB")
    for index, item in enumerate(items):
        writer[index] = {"tokens": item}
    writer.done()
    writer.merge()
    read = litdata.StreamingDataset(folder)
    assert read[0]["tokens"].tolist() == tokens
    second.append(read[1]["tokens"].tolist())
    print(f"{name}: the second item is read as {second[-1]}, {read[1]['tokens'].dtype}")
assert second[0] == [5, 0, 6, 0, 7, 0, 8, 0], "the behaviour has changed"
assert second[1] == [5 + 6 * 2**32, 7 + 8 * 2**32], "the behaviour has changed"
assert second[2] == [5 + 6 * 2**16, 7 + 8 * 2**16], "the behaviour has changed"
PY
