#!/usr/bin/env bash
# One would guess: LlamaTokenizer reads any tokenizer.model of SentencePiece, or refuses one that is not of type BPE.
# True:  transformers 5.23.0 makes a BPE of the pieces of a unigram model, the default type of SentencePiece,
#        without a word: any two pieces that form a third are a merge, scores and normalizer are not used.
#        T5Tokenizer reads the same file rightly.
# Hurt:  whoever has a model of Llama's family with a unigram tokenizer.model: the folder gives other and more
#        tokens than in training, all of them valid, and text still decodes to itself.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet transformers==5.23.0 sentencepiece==0.2.3 protobuf==7.36.2
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import json, random, sys
import sentencepiece, transformers

folder, draw = sys.argv[1], random.Random(0)
stems = "read write train load save split merge count print sort move turn open close start stop build check".split()
words = [p + s + e for p in ("", "re", "un", "over") for s in stems for e in ("", "s", "er", "ers", "ing", "able")]
lines = [" ".join(draw.choices(words, k=12)) + "." for _ in range(1000)]
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_prefix=f"{folder}/tokenizer", vocab_size=300, minloglevel=2)
json.dump({"model_type": "llama"}, open(f"{folder}/config.json", "w"))
processor = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")
expected = processor.encode(lines[:200])
print("transformers", transformers.__version__, "sentencepiece", sentencepiece.__version__)
print(f"sentencepiece: {sum(map(len, expected))} tokens in 200 lines, {processor.encode_as_pieces(lines[0])[:6]}")
equal = {}
for name in ("LlamaTokenizer", "T5Tokenizer"):
    json.dump({"tokenizer_class": name}, open(f"{folder}/tokenizer_config.json", "w"))
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [loaded(line, add_special_tokens=False).input_ids for line in lines[:200]]
    equal[type(loaded).__name__] = sum(a == b for a, b in zip(ids, expected))
    print(f"{type(loaded).__name__}: {sum(map(len, ids))} tokens, {loaded.tokenize(lines[0])[:6]}")
    assert loaded.decode(ids[0]) == lines[0], "the behaviour has changed"
print("lines with sentencepiece's ids:", equal)
assert equal == {"LlamaTokenizer": 0, "T5Tokenizer": 200}, "the behaviour has changed"
PY
