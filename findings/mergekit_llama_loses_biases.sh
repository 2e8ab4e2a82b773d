#!/usr/bin/env bash
# One would guess: a linear merge of a Llama with a copy of it is the same Llama, or mergekit refuses tensors that
#        it does not know.
# True:  mergekit 0.1.5 copies the tensors that its description of Llama lists, and that lists no biases. A
#        Llama with attention_bias and mlp_bias loses all of them, exit status 0. The merged config.json
#        still asks for them, so that transformers 5.23.0 reads them as zeros. Qwen 2 keeps its biases.
# Hurt:  whoever merges models of the Llama class that were trained with biases: each merge, of any method,
#        has another output than its parents, and looks like a merge that went badly.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet mergekit==0.1.5 torch==2.13.0 transformers==5.23.0
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HOME="$work/cache"
"$work/env/bin/python" -W ignore - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import json, subprocess, sys
from importlib.metadata import version
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

shape = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3)
ids = torch.randint(0, 64, (1, 32), generator=torch.Generator().manual_seed(1))
folder = sys.argv[1]
print(*(f"{name} {version(name)}" for name in ("mergekit", "torch", "transformers")))

def merge(config):
    name = config.model_type
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for key, value in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(value, std=0.1)
    for copy in (name, f"copy-{name}"):  # mergekit refuses the same folder twice
        model.save_pretrained(f"{folder}/{copy}")
    parents = [{"model": f"{folder}/{copy}", "parameters": {"weight": 1.0}} for copy in (name, f"copy-{name}")]
    json.dump({"merge_method": "linear", "dtype": "float32", "models": parents}, open(f"{folder}/{name}.yaml", "w"))
    done = subprocess.run([f"{folder}/env/bin/mergekit-yaml", f"{folder}/{name}.yaml", f"{folder}/merged-{name}"],
                          capture_output=True, text=True, check=True)
    assert "bias" not in done.stdout + done.stderr, "the behaviour has changed"
    own, merged = (load_file(f"{folder}/{part}{name}/model.safetensors") for part in ("", "merged-"))
    lost = sorted(own.keys() - merged.keys())
    assert all(torch.allclose(own[key], value, atol=1e-6) for key, value in merged.items())
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/merged-{name}").eval()
    zeros = all(not again.get_parameter(key).any() for key in lost)
    with torch.no_grad():
        difference = (again(ids).logits - model(ids).logits).abs().max().item()
    biases = sum(key.endswith("bias") for key in own)
    print(f"{name}: {len(lost)} of {biases} biases are lost, logits differ by {difference:.2g}")
    assert all(key.endswith("bias") for key in lost) and zeros
    return len(lost), biases, difference

lost, biases, difference = merge(LlamaConfig(**shape, attention_bias=True, mlp_bias=True))
assert (lost, biases) == (14, 14) and difference > 0.1, "the behaviour has changed"
lost, biases, difference = merge(Qwen2Config(**shape))
assert (lost, biases) == (0, 6) and difference < 1e-3, "the behaviour has changed"
PY
