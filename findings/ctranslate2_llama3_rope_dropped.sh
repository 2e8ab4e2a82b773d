#!/usr/bin/env bash
# One would guess: a converter that looks at rope_scaling of a Llama either translates "llama3" or refuses it.
# True:  CTranslate2 4.8.5 converts a Llama with the scaling of Llama 3.1 without a word and computes the
#        plain, unscaled rope: its numbers are those of the same weights without rope_scaling. Linear
#        scaling is right.
# Hurt:  everyone who serves a Llama 3.1, 3.2 or 3.3, or a model trained with this scaling: low frequencies
#        turn faster than in training, the more the longer the text.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet ctranslate2==4.8.5 torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import sys
import ctranslate2, numpy, torch, transformers
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

shape = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
words = ["<unk>", "<s>", "</s>"] + [f"w{n}" for n in range(3, 64)]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>")),
    unk_token="<unk>", bos_token="<s>", eos_token="</s>")
ids = torch.randint(3, 64, (1, 128), generator=torch.Generator().manual_seed(1))

def reference(scaling):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters={"rope_theta": 10000.0} | scaling)).eval()
    with torch.no_grad():
        return model, model(ids).logits[0].log_softmax(-1)

plain = reference({"rope_type": "default"})[1]
length = {"original_max_position_embeddings": 64}
kinds = {"default": {}, "linear": {"factor": 8.0},
         "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | length}
print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__)
off = {}
for kind, keys in kinds.items():
    model, wanted = reference({"rope_type": kind} | keys)
    folder = f"{sys.argv[1]}/{kind}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ctranslate2.converters.TransformersConverter(folder).convert(f"{folder}/converted")
    engine = ctranslate2.Generator(f"{folder}/converted", compute_type="float32")
    scores = engine.forward_batch([[words[n] for n in ids[0].tolist()]], return_log_probs=True)
    seen = torch.from_numpy(numpy.array(scores))[0]
    off[kind] = (seen - wanted).abs().max().item(), (seen - plain).abs().max().item()
    print(f"{kind:8} log probabilities of 128 positions: {off[kind][0]:.1e} from transformers,",
          f"{off[kind][1]:.1e} from transformers without scaling")
assert off["default"][0] < 1e-3 and off["linear"][0] < 1e-3, off
assert off["llama3"][0] > 0.1 and off["llama3"][1] < 1e-3, "the behaviour has changed"
PY
