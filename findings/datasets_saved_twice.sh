#!/usr/bin/env bash
# One would guess: `save_to_disk` to a folder that already has a dataset replaces it, or refuses.
# True:  datasets 5.2.0 writes the new shards beside the old ones. The old files stay, with names like
#        those of the new ones; only state.json knows which belong to the dataset.
# Hurt:  whoever reads the folder as `FOLDER/*.arrow` (pyarrow, polars, duckdb, a loader of one's own)
#        trains on rows of the old dataset, too.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
"$work/env/bin/python" - "$work/saved" <<'PY'
import glob, sys
import datasets, pyarrow as pa

folder = sys.argv[1]
datasets.disable_progress_bars()
datasets.Dataset.from_dict({"text": [f"old {n}" for n in range(10)]}).save_to_disk(folder, num_shards=3)
datasets.Dataset.from_dict({"text": [f"new {n}" for n in range(7)]}).save_to_disk(folder, num_shards=1)

files = sorted(glob.glob(f"{folder}/*.arrow"))
rows = [row for f in files for row in pa.ipc.open_stream(pa.memory_map(f)).read_all()["text"].to_pylist()]
loaded = datasets.load_from_disk(folder)["text"][:]
print("datasets", datasets.__version__)
print("files:", [f.rpartition("/")[2] for f in files])
print(f"load_from_disk: {len(loaded)} rows; all *.arrow files: {len(rows)} rows,",
      f"{sum(r.startswith('old') for r in rows)} of them of the replaced dataset")
assert len(loaded) == 7 and len(rows) == 17 and len(files) == 4, "the behaviour has changed"
PY
