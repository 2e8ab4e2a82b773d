#!/usr/bin/env bash
# One would guess: a converter with a class of its own for Gemma 2 carries over what sets Gemma 2 apart: the
#        softcaps of scores and logits, the windows, the scale of the scores.
# True:  CTranslate2 4.8.5 drops all four without a word. Only a Gemma 2 with the softcaps null, no text
#        longer than the window and query_pre_attn_scalar equal to head_dim has the logits of transformers.
# Hurt:  whoever serves or scores with a Gemma 2, whose published files have both softcaps: every
#        probability is another, from the first token on.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet ctranslate2==4.8.5 torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import sys
import ctranslate2, numpy, torch, transformers
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

plain = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, initializer_range=0.3, query_pre_attn_scalar=32, sliding_window=4096,
             attn_logit_softcapping=None, final_logit_softcapping=None)
words = ["<unk>", "<s>", "</s>"] + [f"w{n}" for n in range(3, 64)]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>")),
    unk_token="<unk>", bos_token="<s>", eos_token="</s>")
ids = torch.randint(3, 64, (1, 128), generator=torch.Generator().manual_seed(1))
cases = [{}, {"final_logit_softcapping": 2.0}, {"attn_logit_softcapping": 2.0}, {"sliding_window": 16},
         {"query_pre_attn_scalar": 128}]
print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__)
off = []
for number, keys in enumerate(cases):
    torch.manual_seed(0)
    model, folder = Gemma2ForCausalLM(Gemma2Config(**plain | keys)).eval(), f"{sys.argv[1]}/{number}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        wanted = model(ids).logits[0].log_softmax(-1)
    ctranslate2.converters.TransformersConverter(folder).convert(f"{folder}/converted")
    engine = ctranslate2.Generator(f"{folder}/converted", compute_type="float32")
    scores = engine.forward_batch([[words[n] for n in ids[0].tolist()]], return_log_probs=True)
    off.append((torch.from_numpy(numpy.array(scores))[0] - wanted).abs().max().item())
    print(f"{keys or 'none of the four'}: log probabilities of 128 positions differ by {off[-1]:.1e}")
assert off[0] < 1e-3, off
assert min(off[1:]) > 0.1, "the behaviour has changed"
PY
