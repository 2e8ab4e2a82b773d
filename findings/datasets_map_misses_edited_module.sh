#!/usr/bin/env bash
# One would guess: map() of datasets reuses its cache for the same function only: after an edit of the function, or of
#        one that it calls, the rows are computed again.
# True:  datasets 5.2.0 hashes the code of functions that are defined in the script itself. A function that
#        is imported from a module counts by its name, and so do those it calls: after an edit of the module
#        the next run returns the rows of the old code, from the cache, without a word.
# Hurt:  whoever keeps the cleaning or tokenizing functions of a corpus in a module of their own, and corrects
#        one: the training goes on with the uncorrected text.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
echo '{"text": "Some Text"}' >corpus.jsonl
show() {
    echo "    return {'text': row['text'].$1()}" | cat <(echo "def clean(row):") - >cleaning.py
    cat cleaning.py - >main.py <<'PY'
import datasets
import cleaning

def calls_module(row):
    return cleaning.clean(row)

datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files="corpus.jsonl", split="train")
texts = [rows.map(function)["text"][0] for function in (clean, cleaning.clean, calls_module)]
print(f"datasets {datasets.__version__}: {', '.join(texts)}")
PY
    "$work/env/bin/python" main.py 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
}
echo "rows by a function of the script, by the same of a module, and by one of the script that calls the module's:"
first=$(show lower)
echo "lower(): $first"
second=$(show upper)
echo "after an edit to upper(): $second"
if [ "$first" != "datasets 5.2.0: some text, some text, some text" ] ||
    [ "$second" != "datasets 5.2.0: SOME TEXT, some text, some text" ]; then
    echo "the behaviour has changed"
    exit 1
fi
