#!/usr/bin/env bash
# One would guess: "rope_scaling": {"type": "linear", "factor": 8.0}, the spelling of older files, scales the
#        positions in every family, since transformers 5 still reads it for Llama.
# True:  transformers 5.23.0 translates "type" to "rope_type" only where the model has one rope. Gemma 3 and
#        OLMo 3 have one per kind of layer: their full-attention layers keep "rope_type": "default", and the
#        only sign is a warning that calls the key 'factor' unrecognized. With "rope_type" it works.
# Hurt:  whoever trains or serves with the older key on a longer context: the model runs on unscaled
#        positions, which it was not trained for.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - "$work/config.json" <<'PY'
import json, sys
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM

shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1)
buffers = {"llama": "inv_freq", "gemma3_text": "full_attention_inv_freq", "olmo3": "full_attention_inv_freq"}

def frequencies(family, scaling):
    with open(sys.argv[1], "w") as file:
        json.dump(shape | {"model_type": family, "rope_scaling": scaling}, file)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
    return getattr(model.model.rotary_emb, buffers[family])

print("transformers", transformers.__version__)
divisors = {}
for family in buffers:
    for key in ("rope_type", "type"):
        scaled = frequencies(family, {key: "linear", "factor": 8.0})
        ratio = frequencies(family, None) / scaled
        assert torch.allclose(ratio, ratio[0]), ratio
        divisors[family, key] = round(ratio[0].item(), 4)
        print(f"{family:12} {key:10} linear, factor 8.0: frequencies of full attention are divided by {ratio[0]:.1f}")
wanted = {(family, "rope_type"): 8.0 for family in buffers}
wanted |= {("llama", "type"): 8.0, ("gemma3_text", "type"): 1.0, ("olmo3", "type"): 1.0}
assert divisors == wanted, "the behaviour has changed"
PY
