#!/usr/bin/env bash
# One would guess: AutoTokenizer.from_pretrained reads the tokenizer.json that save_pretrained has written,
#        whatever family the config.json beside it names.
# True:  with "model_type": "qwen2", transformers 5.23.0 replaces the class that tokenizer_config.json
#        names by Qwen2Tokenizer and takes vocabulary, merges and template alone. Normalizer and splitting are
#        Qwen's, ignore_merges is off, and a token <|endoftext|> is added behind the vocabulary.
#        qwen3, llama and PreTrainedTokenizerFast read the same folder rightly.
# Hurt:  whoever trains a model of Qwen 2's shape with a tokenizer of one's own: ids differ without a warning, and
#        the additional id has no row in the embedding.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import json, sys
import tokenizers, transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

own = Tokenizer(models.BPE(ignore_merges=True))
own.normalizer = normalizers.Lowercase()
own.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)])
own.decoder = decoders.ByteLevel()
lines = ["The year 2024 had 366 days, 2025 had 365.", "There were 120 people and 365 books."] * 50
own.train_from_iterator(lines, trainers.BpeTrainer(
    vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]))
text, folder = "The Year 2024", sys.argv[1]
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
print(f"own tokenizer of {own.get_vocab_size()} tokens: {own.encode(text).tokens}")
seen = {}
for family in ("llama", "qwen3", "qwen2"):
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)
    json.dump({"model_type": family}, open(f"{folder}/config.json", "w"))
    loaded = AutoTokenizer.from_pretrained(folder)
    seen[family] = loaded(text).input_ids == own.encode(text).ids, len(loaded) - own.get_vocab_size()
    print(f"{family}: {type(loaded).__name__} of {len(loaded)} tokens: {loaded.tokenize(text)}")
    backend = json.loads(loaded.backend_tokenizer.to_str())
    print(f"    normalizer {backend['normalizer']['type']}, ignore_merges {backend['model']['ignore_merges']}")
direct = PreTrainedTokenizerFast.from_pretrained(folder)
print(f"PreTrainedTokenizerFast, the folder of qwen2: {direct.tokenize(text)}")
assert direct(text).input_ids == own.encode(text).ids, "the behaviour has changed"
assert seen == {"llama": (True, 0), "qwen3": (True, 0), "qwen2": (False, 1)}, "the behaviour has changed"
PY
