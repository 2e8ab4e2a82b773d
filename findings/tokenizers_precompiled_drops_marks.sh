#!/usr/bin/env bash
# One would guess: the normalizer Precompiled, which has the very table of a SentencePiece model (T5, XLM-R,
#        mT5, ALBERT), replaces what SentencePiece replaces: the longest known sequence of characters.
# True:  tokenizers 0.23.3 looks up a letter with its combining marks, takes the shortest known beginning for
#        all of them and drops the rest; above 5 bytes it looks up single characters, so that nothing is
#        composed. Text in NFC is right; in NFD, Vietnamese loses marks and Korean stays in parts.
# Hurt:  whoever trains with sentencepiece and serves, evaluates or prepares data with tokenizers: text in NFD
#        has other ids, and words of Vietnamese become other words.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2
"$work/env/bin/python" - 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import io, unicodedata
import sentencepiece, tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers

file = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["one two three four five six seven"] * 20), model_writer=file, vocab_size=20,
    hard_vocab_limit=False, normalization_rule_name="nmt_nfkc", add_dummy_prefix=False)
spec = sentencepiece_model_pb2.ModelProto.FromString(file.getvalue()).normalizer_spec
table = normalizers.Precompiled(spec.precompiled_charsmap)
reference = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
words = ["caf\u00e9", "Vi\u1ec7t", "ti\u1ebfng", "\u0111\u1ea5t", "\u304c", "\ud55c\uad6d"]
print("tokenizers", tokenizers.__version__, "sentencepiece", sentencepiece.__version__)
results = {}
for word in words:
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, word)
        results[word, form] = table.normalize_str(text)
        assert reference.normalize(text) == word, "the behaviour has changed"
        print(f"{form} {ascii(text)}: sentencepiece {ascii(word)}, tokenizers {ascii(results[word, form])}",
              "" if results[word, form] == word else "DIFFERENT")
assert all(results[word, "NFC"] == word for word in words), "the behaviour has changed"
assert results["caf\u00e9", "NFD"] == "caf\u00e9", "the behaviour has changed"
assert results["Vi\u1ec7t", "NFD"] == "Vi\u1eb9t" and results["ti\u1ebfng", "NFD"] == "ti\u00eang", "the behaviour has changed"
assert results["\ud55c\uad6d", "NFD"] == unicodedata.normalize("NFD", "\ud55c\uad6d"), "the behaviour has changed"
PY
