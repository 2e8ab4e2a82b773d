#!/usr/bin/env bash
# One would guess: mlx-lm, which builds on transformers, reads a Llama that the same installation's
#        transformers 5 has just saved.
# True:  mlx-lm 0.32.2 reads rope_theta and rope_scaling of version 4 for Llama, and not "rope_parameters",
#        the only key that transformers 5.23.0 writes. It then takes base 10000 and no scaling, without a
#        warning. Qwen 3 is read rightly from the same key, and a Llama with the older keys, too.
# Hurt:  whoever trains a Llama with another base (Llama 3 has 500000) or a longer context and saves it with
#        transformers 5: loading succeeds, and the model is another from the second token on.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet mlx-lm==0.32.2 "mlx[cpu]==0.32.4" torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import json, pathlib, sys
from importlib.metadata import version
import mlx.core as mx
import numpy, torch
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

mx.set_default_device(mx.cpu)
shape = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.3,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)
ids = torch.randint(3, 64, (1, 64), generator=torch.Generator().manual_seed(1))
base = {"rope_type": "default", "rope_theta": 500000.0}
linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
cases = [("llama", LlamaForCausalLM, LlamaConfig(**shape, rope_parameters=base), "base 500000"),
         ("llama", LlamaForCausalLM, LlamaConfig(**shape, rope_parameters=linear), "linear, factor 8"),
         ("qwen3", Qwen3ForCausalLM, Qwen3Config(**shape, rope_parameters=base), "base 500000")]

def off(folder, wanted):
    logits = numpy.array(load_model(pathlib.Path(folder))[0](mx.array(ids.numpy())))[0]
    return float(abs(logits - wanted).max())

print(*(f"{name} {version(name)}" for name in ("mlx-lm", "mlx", "transformers")))
seen = []
for number, (family, kind, config, label) in enumerate(cases):
    torch.manual_seed(0)
    model, folder = kind(config).eval(), f"{sys.argv[1]}/{number}"
    model.save_pretrained(folder)
    with torch.no_grad():
        wanted = model(ids).logits[0].numpy()
    saved = off(folder, wanted)
    keys = json.load(open(f"{folder}/config.json"))
    rope = keys.pop("rope_parameters")
    keys |= {"rope_theta": rope.pop("rope_theta")} | ({"rope_scaling": rope} if "factor" in rope else {})
    json.dump(keys, open(f"{folder}/config.json", "w"))
    seen.append((saved, off(folder, wanted)))
    print(f"{family} {label}: logits differ by {saved:.1e} as saved, by {seen[-1][1]:.1e} with the older keys")
assert all(older < 1e-3 for _, older in seen) and seen[2][0] < 1e-3, seen
assert seen[0][0] > 0.1 and seen[1][0] > 0.1, "the behaviour has changed"
PY
