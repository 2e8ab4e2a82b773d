#!/usr/bin/env bash
# One would guess: a drop-in replacement of tokenizers, which reads the tokenizer.json, finds the added tokens
#        where tokenizers finds them, or refuses their options.
# True:  gigatoken 0.10.0 ignores `single_word`, so that it finds such a token inside of other words. No error or
#        warning tells.
# Hurt:  whoever adds words to a vocabulary and prepares a corpus with gigatoken: the model is trained on other ids
#        than it is served with.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet gigatoken==0.10.0 tokenizers==0.23.3 awkward==2.14.0
"$work/env/bin/python" - 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import gigatoken, tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

def both(token, text):
    model = models.BPE(vocab={piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    reference = tokenizers.Tokenizer(model)
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    reference.add_tokens([token])
    fast = gigatoken.Tokenizer.from_json(reference.to_str())
    number = reference.token_to_id(str(token.content))
    counts = [list(ids).count(number) for ids in (reference.encode(text).ids, fast.encode(text))]
    print(f"{ascii(token.content)} in {ascii(text)}: tokenizers {counts[0]}, gigatoken {counts[1]}")
    return counts

print("tokenizers", tokenizers.__version__)
word = AddedToken("word", single_word=True)
assert both(word, "a word") == [1, 1], "the behaviour has changed"
assert both(word, "words, swordfish, a word") == [1, 3], "the behaviour has changed"
PY
