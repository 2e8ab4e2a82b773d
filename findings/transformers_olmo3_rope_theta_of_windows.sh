#!/usr/bin/env bash
# One would guess: Olmo3Config(rope_theta=10000.0), or "rope_theta": 10000.0 in config.json, is the base of
#        all layers, as in other families with one "rope_theta".
# True:  transformers 5.23.0 gives it to the full-attention layers alone. The layers with a window, three
#        of four, keep 500000, without a warning; so does "rope_parameters" with one flat base, which is
#        not used for any layer.
# Hurt:  whoever pretrains an OLMo 3 with another base, or converts one: most layers rotate by other angles.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work" 2>&1 <<'PY'
import json, sys
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Olmo3Config

shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1)

def bases(config):
    """The base of each layer, from the second of eight frequencies: base ** -(1 / 8)."""
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    return [round(getattr(rotary, f"{kind}_inv_freq")[1].item() ** -8) for kind in config.layer_types]

def from_file(keys):
    with open(f"{sys.argv[1]}/config.json", "w") as file:
        json.dump(shape | {"model_type": "olmo3"} | keys, file)
    return AutoConfig.from_pretrained(sys.argv[1])

print("transformers", transformers.__version__)
flat = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
seen = []
for label, config in {
    "Olmo3Config(rope_theta=10000.0)": Olmo3Config(**shape, rope_theta=10000.0),
    '{"rope_theta": 10000.0}': from_file({"rope_theta": 10000.0}),
    json.dumps(flat): from_file(flat),
}.items():
    seen.append(bases(config))
    print(f"{label}: bases of the layers {seen[-1]}; kinds {[k.split('_')[0] for k in config.layer_types]}")
near = lambda bases, wanted: all(abs(b / w - 1) < 1e-3 for b, w in zip(bases, wanted))
windows = [500000] * 3
assert near(seen[0], windows + [10000]) and near(seen[1], windows + [10000]), "the behaviour has changed"
assert near(seen[2], windows + [500000]), "the behaviour has changed"
PY
