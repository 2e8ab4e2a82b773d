#!/usr/bin/env bash
# One would guess: from_pretrained with TorchAoConfig(Int8WeightOnlyConfig()) quantizes the linear layers of
#        every family, or refuses a model without any that it can quantize.
# True:  with transformers 5.23.0 and torchao 0.18.0 a GPT-2 stays in fp32, all of it: its layers are Conv1D.
#        is_quantized is True, the configuration has its quantization_config, nothing warns, and the
#        logits are equal to the last bit. A Llama by the same line is int8.
# Hurt:  whoever measures what int8 costs on GPT-2, the usual small model: the loss "does not change", and
#        the memory is the old one.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 torchao==0.18.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" -W ignore - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import sys
import torch, torchao, transformers
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, TorchAoConfig

print("transformers", transformers.__version__, "torchao", torchao.__version__)
counts = {}
for config in (GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4),
               LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)):
    folder = f"{sys.argv[1]}/{config.model_type}"
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    small = AutoModelForCausalLM.from_pretrained(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    int8 = sum(type(p.data) is not torch.Tensor for p in small.parameters())
    with torch.no_grad():
        difference = (small(torch.arange(32)[None]).logits - model(torch.arange(32)[None]).logits).abs().max().item()
    counts[config.model_type] = (int8, difference)
    print(f"{config.model_type}: is_quantized {small.is_quantized}, {int8} tensors in int8, logits differ by {difference:.2g}")
    assert small.is_quantized and small.config.quantization_config is not None, "the behaviour has changed"
assert counts["gpt2"] == (0, 0.0), "the behaviour has changed"
assert counts["llama"][0] == 7 and counts["llama"][1] > 0, "the behaviour has changed"
PY
