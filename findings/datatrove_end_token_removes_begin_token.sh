#!/usr/bin/env bash
# One would guess: eos_token of datatrove's DocumentTokenizer adds an end token to what the tokenizer gives:
#        with a tokenizer that begins texts with <s>, documents are <s> ... </s>.
# True:  datatrove 0.10.1 replaces the tokenizer's post-processor by one of its own with the end token only.
#        Without eos_token each document has <s>, with it none has. Nothing warns, and the metadata
#        beside the tokens does not tell.
# Hurt:  whoever tokenizes for a model of Llama's kind: the model never sees the begin token in training, and
#        every evaluation begins with it. Two folders of one pipeline do not match.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet datatrove==0.10.1 tokenizers==0.23.3 numpy orjson
"$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import importlib.metadata, sys
import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

work = sys.argv[1]
tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, unk_token="c"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.add_special_tokens(["<s>", "</s>"])
tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
tokenizer.save(f"{work}/tokenizer.json")
print("datatrove", importlib.metadata.version("datatrove"), "with the ids", tokenizer.get_vocab())
print("tokenizer alone: 'a b' ->", tokenizer.encode("a b").ids, " 'c' ->", tokenizer.encode("c").ids)
stored = {}
for eos in (None, "</s>"):
    folder = f"{work}/{'with' if eos else 'without'}"
    step = DocumentTokenizer(output_folder=folder, tokenizer_name_or_path=f"{work}/tokenizer.json", eos_token=eos,
                             shuffle_documents=False)
    step.run([Document("a b", id="0"), Document("c", id="1")], 0, 1)
    stored[eos] = np.fromfile(f"{folder}/00000_unshuffled.ds", np.uint16).tolist()
    print(f"eos_token={eos!r}: tokens {stored[eos]}")
assert stored[None] == [0, 2, 3, 0, 4], "the behaviour has changed"
assert stored["</s>"] == [2, 3, 1, 4, 1], "the behaviour has changed"
PY
