#!/usr/bin/env bash
# One would guess: a BPE tokenizer without an unknown token raises at a character it lacks, or leaves a
#        gap: "a?b" is two tokens.
# True:  tokenizers 0.23.3 drops the character and then merges what stood on its two sides: "a?b" is
#        the single token "ab", and a text of unknown characters alone has no tokens. Nothing warns.
# Hurt:  whoever trains with a vocabulary without byte fallback, or whose byte-level vocabulary was
#        trained without the initial alphabet: words of other scripts become other words.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet tokenizers==0.23.3
"$work/env/bin/python" - <<'PY'
import tokenizers
from tokenizers import Tokenizer, models

tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
print("tokenizers", tokenizers.__version__)
for text in ("ab", "a7b", "a77777b", "777"):
    encoded = tokenizer.encode(text)
    print(f"{text!r}: ids {encoded.ids}, tokens {encoded.tokens}, offsets {encoded.offsets}")
assert tokenizer.encode("a7b").ids == [2] and tokenizer.encode("777").ids == [], "the behaviour has changed"
PY
