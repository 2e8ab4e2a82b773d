#!/usr/bin/env bash
# One would guess: LoRA with target_modules="all-linear" is LoRA on the nn.Linear layers but the head. In a
#        Mixtral or Qwen3-MoE of transformers 5 these are attention's four projections: router and
#        experts are bare parameters there, as in gpt_oss, and are left alone.
# True:  peft 0.21.2 adds the router's gate and the experts' 3-D weights for these families, though none is
#        a linear layer, and not for gpt_oss. r is not the rank there: the experts' two tensors get
#        2 and 1 times r times the number of experts. The same layers given by name are attention only.
# Hurt:  whoever tunes a mixture of experts: the routing is trained, the adapter is many times as large
#        as its four projections, and two families tuned by one line are not comparable.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" -W ignore - <<'PY'
import peft, torch, transformers
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

shape = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
configs = [MixtralConfig(**shape, intermediate_size=48, num_local_experts=4),
           Qwen3MoeConfig(**shape, moe_intermediate_size=48, num_experts=4),
           GptOssConfig(**shape, intermediate_size=48, num_local_experts=4)]
attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
print("transformers", transformers.__version__, "peft", peft.__version__, "r=8, 4 experts")
extra = {}
for config in configs:
    sizes = []
    for targets in ("all-linear", attention):
        model = AutoModelForCausalLM.from_config(config)
        linear = sorted(n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
        assert linear == sorted(attention + ["lm_head"]), linear
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        sizes.append(sum(p.numel() for p in trained.values()))
        if targets == "all-linear":
            ranks = {n.split("layers.0.")[1].split(".lora_A")[0]: len(p) for n, p in trained.items() if "lora_A" in n}
    extra[config.model_type] = {n: r for n, r in ranks.items() if not n.startswith("self_attn")}
    print(f"{config.model_type}: nn.Linear are {linear}")
    print(f"    all-linear: {sizes[0]} numbers; the four projections by name: {sizes[1]}")
    print(f"    adapted besides attention, with the rank: {extra[config.model_type]}")
for family in ("mixtral", "qwen3_moe"):
    assert extra[family] == {"mlp.gate": 8, "mlp.experts": 32, "mlp.experts.base_layer": 64}, "the behaviour has changed"
assert extra["gpt_oss"] == {}, "the behaviour has changed"
PY
