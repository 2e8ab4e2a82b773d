#!/usr/bin/env bash
# One would guess: convert_tiktoken_to_fast, which is given the tiktoken.Encoding with the id of each special token,
#        writes a tokenizer.json with these ids.
# True:  transformers 5.23.0 takes their names alone and numbers them from the end of the vocabulary. Where an
#        encoding leaves a gap, as cl100k_base and o200k_base do, each special token has another id, and in
#        o200k_base's arrangement <|endofprompt|> gets the id of <|endoftext|>. Text has the same ids.
# Hurt:  whoever trains with tiktoken and exports this way, or the other way round: the end of a document is a
#        row that was never trained, or ends the text where a prompt ends.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3 tiktoken==0.14.0 blobfile==3.3.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work/converted" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import sys
from importlib.metadata import version
import tiktoken
from transformers import PreTrainedTokenizerFast
from transformers.integrations.tiktoken import convert_tiktoken_to_fast

ranks = {bytes([byte]): byte for byte in range(256)}
ranks |= {token: 256 + n for n, token in enumerate([b"in", b"er", b" t", b"th", b"the"])}
size = len(ranks)  # o200k_base has 199998 tokens, <|endoftext|> is 199999, <|endofprompt|> 200018
encoding = tiktoken.Encoding("example", pat_str=r" ?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": size + 1, "<|endofprompt|>": size + 20})
convert_tiktoken_to_fast(encoding, sys.argv[1])
converted = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
print(*(f"{name} {version(name)}" for name in ("transformers", "tokenizers", "tiktoken")))
text = "the inner thing 2026<|endofprompt|>other<|endoftext|>"
expected, ids = encoding.encode(text, allowed_special="all"), converted(text).input_ids
moved = {token: (encoding.encode_single_token(token), converted.convert_tokens_to_ids(token))
         for token in encoding.special_tokens_set}
print("tiktoken:    ", expected)
print("transformers:", ids)
for token, (before, after) in sorted(moved.items()):
    print(f"{token}: {before} in tiktoken, {after} after the conversion")
ordinary = [id for id in expected if id < size]
assert ordinary == [id for id in ids if id < size], "the behaviour has changed"
assert moved == {"<|endoftext|>": (size + 1, size), "<|endofprompt|>": (size + 20, size + 1)}, "the behaviour has changed"
PY
