#!/usr/bin/env bash
# One would guess: YaRN in litgpt (rope_adjustments with beta_fast and beta_slow) keeps the fast dimensions of
#        rotary positions and slows the others by its factor, as the paper and transformers do.
# True:  litgpt 0.5.13 has it the other way round: the fastest dimension is slowed by the whole factor, and
#        the slowest ones are not scaled at all.
# Hurt:  whoever trains or tunes a model with YaRN there, such as DeepSeek's: its positions are not those that
#        the weights were trained with, and an export to transformers has other logits than the trainer.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
# Without its dependencies: importing litgpt.model needs these alone.
"$work/env/bin/pip" install --quiet --no-deps litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 \
  torchmetrics==1.9.0 pytorch-lightning==2.6.6 jsonargparse==4.41.0 docstring-parser==0.18.0 typeshed-client==2.15.0 psutil==7.2.2
"$work/env/bin/python" - 2>/dev/null <<'PY'
from importlib.metadata import version

import torch
from litgpt.model import build_rope_cache
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

yarn = {"factor": 4.0, "beta_fast": 32, "beta_slow": 1}
cos, sin = build_rope_cache(2, 32, extra_config=yarn | {"original_max_seq_len": 64})
mine = torch.atan2(sin[1, :16], cos[1, :16])
parameters = yarn | {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
config = LlamaConfig(
    hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=parameters
)
theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
print(f"litgpt {version('litgpt')}, transformers {version('transformers')}")
plain = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
for name, values in (("litgpt", mine), ("transformers", theirs)):
    ratio = values / plain
    print(f"{name:12} frequencies over unscaled ones: fastest {ratio[0]:.3f}, slowest {ratio[-1]:.3f}")
assert abs(mine[0] / plain[0] - 0.25) < 1e-3 and abs(mine[-1] / plain[-1] - 1) < 1e-3, "changed"
assert abs(theirs[0] / plain[0] - 1) < 1e-3 and abs(theirs[-1] / plain[-1] - 0.25) < 1e-3, "changed"
PY
