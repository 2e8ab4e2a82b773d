#!/usr/bin/env bash
# One would guess: in a checkpoint of torchtitan, the states of the optimizer have the names and shapes of the
#        weights: `optimizer.state.NAME.exp_avg` for each `NAME`.
# True:  torchtitan 0.3.0 saves the weights of queries, keys and values as three, but their moments as those of one
#        fused parameter, whose rows are ordered by key-value group: its queries, its key, its value.
# Hurt:  whoever carries a run on elsewhere, shards or converts it by the names of the weights: a third of each
#        layer's moments is not found, and cutting the fused ones in three gives each weight rows of the others.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 einops==0.8.2 datasets==5.2.0 tokenizers==0.23.3 \
  tensorboard==2.21.0 safetensors==0.8.0
# Without their dependencies: these suffice for a model on a CPU.
"$work/env/bin/pip" install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torchdata==0.11.0 \
  torch_checkpointing==0.1.1 tyro==1.0.17 docstring_parser==0.17.0 typeguard==4.6.0
cd "$work"
"$work/env/bin/python" - 2>/dev/null <<'PY'
import importlib.machinery
import sys
from importlib.metadata import version
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist

# Its kernels for experts need a GPU to be imported.
kernels = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules[kernels] = MagicMock(__spec__=importlib.machinery.ModuleSpec(kernels, None))
from torchtitan.components.optimizer import default_adamw
from torchtitan.models import llama3
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import ComplexRoPE

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
width, heads, kv_heads, vocab = 32, 4, 2, 64
attention = ScaledDotProductAttention.Config()
with patch.object(llama3, "get_attention_config", lambda name: attention):
    layers = llama3._build_llama3_layers(
        n_layers=1, dim=width, n_heads=heads, n_kv_heads=kv_heads, hidden_dim=48,
        rope=ComplexRoPE.Config(dim=width // heads, max_seq_len=64, theta=500000), attn_backend="sdpa",
    )
head = Linear.Config(in_features=width, out_features=vocab, param_init=llama3._output_linear_init(width))
model = llama3.Llama3Model.Config(
    dim=width, vocab_size=vocab, layers=layers, lm_head=head,
    tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init=llama3._EMBEDDING_INIT),
    norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
).build()
torch.manual_seed(1)
model.init_weights(buffer_device=None)
config = default_adamw(lr=1e-3)
config.implementation = "for-loop"
optimizers = config.build(model_parts=[model])
model(torch.randint(vocab, (2, 8))).float().square().mean().backward()
optimizers.step()

weights = {name: tuple(value.shape) for name, value in model.state_dict().items() if ".attention." in name}
start, end = "state.", ".exp_avg"
moments = {
    name.removeprefix(start).removesuffix(end): tuple(value.shape)
    for name, value in optimizers.state_dict().items()
    if name.endswith(end) and ".attention." in name
}
print(f"torchtitan {version('torchtitan')}, torch {torch.__version__}")
for title, shapes in (("weights", weights), ("moments", moments)):
    for name, shape in sorted(shapes.items()):
        print(f"{title}  {name:48} {shape}")
lost = sorted(weights.keys() - moments.keys())
assert [name.split(".")[-2] for name in lost] == ["wk", "wq", "wv"], "changed"
(fused,) = moments.keys() - weights.keys()
assert moments[fused][0] == sum(weights[name][0] for name in lost), "changed"
parameter, parts = dict(model.named_parameters())[fused], model.state_dict()
size = width // heads
queries, keys, values = (parts[next(n for n in lost if f".{part}." in n)] for part in ("wq", "wk", "wv"))
first = torch.cat([queries[: heads // kv_heads * size], keys[:size], values[:size]])
assert torch.equal(parameter[: len(first)], first), "changed"
print(f"rows 0 to {len(first) - 1} of {fused}: the first group's {heads // kv_heads} queries, its key, its value")
PY
