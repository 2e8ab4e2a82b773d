#!/usr/bin/env bash
# One would guess: "original_max_position_embeddings" inside "rope_scaling" is the length that YaRN and
#        Llama 3's scaling start from; a key of this name at the top level of config.json belongs to Phi-3's
#        longrope, and a Llama does not look at it.
# True:  transformers 5.23.0 lets the top-level key replace the value inside, for Llama too: with 1024
#        outside and 256 inside, both scalings compute from 1024. YaRN warns that the factor does not fit the
#        lengths, which would be right with 256; Llama 3's scaling says nothing.
# Hurt:  models whose context was extended twice, or whose config.json another tool completed: the same
#        file is another model to every program that reads "rope_scaling" alone.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work/config.json" 2>&1 <<'PY'
import json, sys
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM

shape = dict(model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=2, head_dim=16, rope_theta=10000.0,
             max_position_embeddings=2048, pad_token_id=0, eos_token_id=1)
kinds = {"yarn": {"rope_type": "yarn", "factor": 8.0},
         "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}

def model(scaling, **outside):
    with open(sys.argv[1], "w") as file:
        json.dump(shape | outside | {"rope_scaling": scaling}, file)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).eval()

key = "original_max_position_embeddings"
tokens = torch.arange(512)[None] % 64
print("transformers", transformers.__version__)
for kind, scaling in kinds.items():
    inside = model(scaling | {key: 256})
    both = model(scaling | {key: 256}, **{key: 1024})
    other = model(scaling | {key: 1024})
    frequencies = [m.model.rotary_emb.inv_freq for m in (inside, both, other)]
    with torch.no_grad():
        moved = (inside(tokens).logits - both(tokens).logits).abs().max().item()
    print(f"{kind}: 256 inside: {[f'{x:.5f}' for x in frequencies[0].tolist()]}")
    print(f"{kind}: 256 inside, 1024 outside: {[f'{x:.5f}' for x in frequencies[1].tolist()]}, logits move by {moved:.1e}")
    assert torch.equal(frequencies[1], frequencies[2]), "the behaviour has changed"
    assert not torch.allclose(frequencies[0], frequencies[1]) and moved > 1e-4, "the behaviour has changed"
PY
