#!/usr/bin/env bash
# One would guess: a JSON lines file whose key "text" has strings, and in one late line an object, a
#        list or a number, is an error, or a missing value.
# True:  datasets 5.2.0 makes text of the value where it comes in a later block of the file: the row is
#        the JSON source, such as '{"a":1}' or '[1,2]'. In the first block it decides the column's type.
# Hurt:  whoever prepares a corpus with load_dataset("json"): a broken export of a few documents is
#        trained on as brackets and quotes, and nothing counts them.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
HF_HOME="$work/hf" "$work/env/bin/python" - "$work/corpus.jsonl" <<'PY'
import json, sys
import datasets

path = sys.argv[1]
late = [{"a": 1}, [1, 2], 7, True]
with open(path, "w") as file:
    for n in range(3000):
        file.write(json.dumps({"text": f"document {n} " * 40}) + "\n")
    for value in late:
        file.write(json.dumps({"text": value}) + "\n")
datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files=path, split="train", chunksize=1 << 16)
seen = rows[-len(late):]["text"]
print("datasets", datasets.__version__, rows.features)
for value, text in zip(late, seen):
    print(f"in the file {json.dumps(value):10} -> row {text!r}")
assert rows.features["text"].dtype in ("string", "large_string"), rows.features
assert [json.loads(text) for text in seen] == late, "the behaviour has changed"
PY
