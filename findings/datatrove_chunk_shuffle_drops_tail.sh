#!/usr/bin/env bash
# One would guess: shuffle_chunk_size of datatrove's DocumentTokenizer shuffles pieces of that many tokens, and all
#        tokens are in the result; .ds.index lists the ends of documents as in every other file.
# True:  datatrove 0.10.1 drops the tokens after the last complete piece, also its metadata counts the rest alone.
#        The .ds.index lists the ends of pieces as well as those of documents, with nothing to tell them
#        apart: a document that a piece divides appears as two, far from each other.
# Hurt:  whoever shuffles pieces of a training's length: up to one piece of each file is not trained on, and
#        counts of documents, and masks between them, are those of pieces.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet datatrove==0.10.1 tokenizers==0.23.3 numpy orjson
"$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import glob, importlib.metadata, sys
import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

work = sys.argv[1]
words = {"</s>": 0, "a": 1, "b": 2, "c": 3, "d": 4}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.add_special_tokens(["</s>"])
tokenizer.save(f"{work}/tokenizer.json")
texts = ["a a a", "b b b b", "c c", "d d d d d"]
print("datatrove", importlib.metadata.version("datatrove"), "with the texts", texts)
seen = {}
for size in (None, 8):
    folder = f"{work}/{size}"
    step = DocumentTokenizer(output_folder=folder, tokenizer_name_or_path=f"{work}/tokenizer.json", eos_token="</s>",
                             shuffle_documents=False, shuffle_chunk_size=size)
    step.run([Document(text, id=str(at)) for at, text in enumerate(texts)], 0, 1)
    (name,) = glob.glob(f"{folder}/*.ds")
    tokens = np.fromfile(name, np.uint16)
    ends = np.fromfile(f"{name}.index", np.uint64).tolist()
    count = open(f"{name}.metadata").read().split("\n")[1]
    seen[size] = len(tokens), len(ends), int(count)
    print(f"shuffle_chunk_size={size}: {len(tokens)} tokens (metadata: {count}), document ends {ends}")
assert seen[None] == (18, 4, 18), "the behaviour has changed"
assert seen[8] == (16, 5, 16), "the behaviour has changed"
PY
