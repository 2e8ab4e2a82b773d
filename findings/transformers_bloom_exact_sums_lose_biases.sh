#!/usr/bin/env bash
# One would guess: "slow_but_exact": true of a Bloom adds the partial products of tensor-parallel training
#        in their order: the same model up to rounding, and nearer to the trained one.
# True:  with pretraining_tp above 1, transformers 5.23.0 then leaves out the bias of attention's dense layer
#        and of the MLP's second layer. The logits are exactly those of a Bloom whose two biases are
#        zero; nothing warns, and with pretraining_tp 1 the key does nothing.
# Hurt:  whoever sets the key to compare a conversion bit by bit: the reference is another model, by as much
#        as the biases weigh.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'PY'
import torch, transformers
from transformers import BloomConfig, BloomForCausalLM

LOST = ("self_attention.dense.bias", "mlp.dense_4h_to_h.bias")
torch.manual_seed(0)
start = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).state_dict()
trained = {n: torch.randn_like(v) * 0.2 if n.endswith("bias") else v for n, v in start.items()}
unbiased = {n: torch.zeros_like(v) if n.endswith(LOST) else v for n, v in trained.items()}


@torch.no_grad()
def logits(weights, exact, parallel):
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, pretraining_tp=parallel, slow_but_exact=exact)
    model = BloomForCausalLM(config).eval()
    model.load_state_dict(weights)
    return model(torch.arange(32)[None]).logits


fast, exact = logits(trained, False, 2), logits(trained, True, 2)
print(f"transformers {transformers.__version__}, pretraining_tp 2, largest difference of the logits:")
print(f"  slow_but_exact against the plain model: {(exact - fast).abs().max():.3g} (logits up to {fast.abs().max():.3g})")
print(f"  slow_but_exact against the plain model with two biases of each layer zero:",
      f"{(exact - logits(unbiased, False, 2)).abs().max():.3g}")
print(f"  pretraining_tp 1: {(logits(trained, True, 1) - fast).abs().max():.3g}")
assert (exact - fast).abs().max() > 1e-2, "the behaviour has changed"
assert torch.allclose(exact, logits(unbiased, False, 2), atol=1e-5), "the behaviour has changed"
PY
