#!/usr/bin/env bash
# One would guess: a column "ndarray:uint16" of an MDS dataset has the array's bytes, as index.json gives
#        the type and the sizes of the samples: the tokens of a one-dimensional array are the sample.
# True:  mosaicml-streaming 0.13.0 writes a header before the numbers of each sample unless the column has
#        type and shape ("ndarray:uint16:8"): one byte for dimensions and width, then the shape; a plain
#        "ndarray" has one byte more for the type. index.json does not tell.
# Hurt:  whoever reads or converts MDS tokens without the library: each sample begins with a false token,
#        or, with an odd header, all its tokens are shifted by one byte.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 mosaicml-streaming==0.13.0
"$work/env/bin/python" - "$work" <<'PY' 2>/dev/null
import json, sys
import numpy as np, streaming

tokens = np.arange(1, 9, dtype=np.uint16)
print("mosaicml-streaming", streaming.__version__, "tokens", tokens.tolist())
headers = {}
for encoding in ("ndarray:uint16:8", "ndarray:uint16", "ndarray"):
    folder = f"{sys.argv[1]}/{encoding.replace(':', '_')}"
    with streaming.MDSWriter(out=folder, columns={"tokens": encoding}) as writer:
        writer.write({"tokens": tokens})
    shard = json.load(open(f"{folder}/index.json"))["shards"][0]
    data = open(f"{folder}/{shard['raw_data']['basename']}", "rb").read()
    begin, end = np.frombuffer(data, np.uint32, 2, offset=4)
    sample = data[begin:end]
    if shard["column_sizes"][0] is None:
        sample = sample[4:]  # the size of a column of free size, which the format documents
    headers[encoding] = sample[: len(sample) - tokens.nbytes].hex()
    read = np.frombuffer(sample[: len(sample) // 2 * 2], np.uint16).tolist()
    print(f"{encoding}: header {headers[encoding]!r}; the sample as uint16: {read}")
    reader = streaming.base.format.reader_from_json(folder, None, shard)
    assert reader[0]["tokens"].tolist() == tokens.tolist()
assert headers["ndarray:uint16:8"] == "", "the behaviour has changed"
assert len(headers["ndarray:uint16"]) == 4 and len(headers["ndarray"]) == 6, "the behaviour has changed"
PY
