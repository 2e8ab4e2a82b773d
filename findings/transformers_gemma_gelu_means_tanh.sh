#!/usr/bin/env bash
# One would guess: "hidden_act": "gelu" in config.json is the exact GELU, as it is for every other family,
#        and two versions of transformers compute the same model from one file.
# True:  for Gemma 1, transformers 5.23.0 replaces "gelu" by the tanh approximation when it reads the
#        file, even if "hidden_activation": "gelu" asks for the exact one. Version 4.57.6 computes the
#        exact GELU from the same key, and ignores "hidden_activation". The published files of Gemma 1
#        have "hidden_act": "gelu" with "hidden_activation": null, so the two versions disagree on them.
# Hurt:  converters and engines that read the key as it stands compute another activation than the
#        reference (1e-4 of the logits), and a Gemma trained with the exact GELU cannot be exported.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" <<'PY'
import json, sys
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM

shape = dict(model_type="gemma", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2, head_dim=16)
x = torch.linspace(-3, 3, 101)
exact, tanh = torch.nn.functional.gelu(x), torch.nn.functional.gelu(x, approximate="tanh")
names = []
for keys in ({"hidden_act": "gelu"}, {"hidden_activation": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}):
    json.dump(shape | keys, open(f"{sys.argv[1]}/config.json", "w"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
    y = model.model.layers[0].mlp.act_fn(x)
    names.append("exact" if torch.equal(y, exact) else "tanh" if torch.allclose(y, tanh, atol=1e-6) else "other")
    print(f"transformers {transformers.__version__}: {json.dumps(keys)} -> {names[-1]}")
wanted = ["tanh"] * 3 if transformers.__version__.startswith("5") else ["exact", "tanh", "exact"]
assert names == wanted, f"the behaviour has changed: {names}"
PY
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
for version in 4.57.6 5.23.0; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
  mkdir "$work/model$version"
  "$work/$version/bin/python" "$work/read.py" "$work/model$version" 2>/dev/null
done
