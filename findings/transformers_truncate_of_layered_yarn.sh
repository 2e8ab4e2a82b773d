#!/usr/bin/env bash
# One would guess: "truncate": false in the parameters of YaRN leaves the ends of its ramp unrounded,
#        wherever these parameters stand in config.json.
# True:  transformers 5.23.0 looks for "truncate" at the top of rope_parameters. Where the parameters are
#        given per kind of layer, as OLMo 3 has them, the factor of the kind counts and its "truncate" does
#        not: the ramp is rounded, and nothing warns of it. A Llama with the same parameters follows it.
# Hurt:  whoever trains a model with windows and gpt-oss's kind of YaRN, or loads one that another program
#        made: the frequencies within the ramp are others, by almost half of their value in this example.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work/config.json" 2>&1 <<'PY'
import json, sys
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM

shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1)
yarn = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 256}
plain = {"rope_type": "default", "rope_theta": 500000.0}

def frequencies(family, parameters):
    if family != "llama":
        parameters = {"full_attention": parameters, "sliding_attention": plain}
    with open(sys.argv[1], "w") as file:
        json.dump(shape | {"model_type": family, "rope_parameters": parameters}, file)
    rotary = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).model.rotary_emb
    return rotary.inv_freq if family == "llama" else rotary.full_attention_inv_freq

print("transformers", transformers.__version__)
for family in ("llama", "olmo3"):
    rounded, unrounded = (frequencies(family, yarn | {"truncate": value}) for value in (True, False))
    other_factor = frequencies(family, yarn | {"factor": 4.0})
    change = (unrounded / rounded - 1).abs().max().item()
    print(f"{family:12} truncate true  {[f'{x:.6f}' for x in rounded.tolist()]}")
    print(f"{family:12} truncate false {[f'{x:.6f}' for x in unrounded.tolist()]}, largest change {change:.3f}")
    assert not torch.equal(rounded, other_factor), "the other parameters are not read"
    assert (change > 0.1) == (family == "llama"), "the behaviour has changed"
PY
