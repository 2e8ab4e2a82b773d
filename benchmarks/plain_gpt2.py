"""GPT-2 in plain PyTorch: the model that a bare training loop compiles as a whole.

The architecture is that of Radford et al. (2019), "Language Models are Unsupervised Multitask
Learners": pre-norm blocks, learned positions, tanh GELU, tied embeddings. Knows neither megatron_ds
nor DeepSpeed.

Shapes: B samples, S tokens, H hidden size, n heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention and an MLP of four times the hidden size, with residuals."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.fc_in = nn.Linear(hidden, 4 * hidden)
        self.fc_out = nn.Linear(4 * hidden, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BSH)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, n, S, H/n] each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSH = x_BSH + self.proj(attended.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.fc_in(self.mlp_norm(x_BSH)), approximate="tanh")
        out: Tensor = x_BSH + self.fc_out(hidden)
        return out


class GPT2(nn.Module):
    """The model and its loss."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "fc_out.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the mean cross entropy over all tokens, a scalar."""
        places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.tokens(tokens_BS) + self.positions(places)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BSV = F.linear(self.norm(x_BSH), self.tokens.weight)
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def training_step(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    device: torch.device,
    dtype: str,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    clip: float,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A bare loop's step: autocast, backward, clipping and torch's fused AdamW on fp32 weights.

    Args:
        model: Model on the device.
        loss_of: Computes the loss of token ids and labels [B, S] on the device.
        device: Device of the model.
        dtype: "fp32" or "bf16".
        lr: Learning rate.
        betas: AdamW's betas.
        weight_decay: Weight decay of all parameters.
        clip: Largest gradient norm.

    Returns:
        A function of token ids and labels [B, S] that returns the loss, not synchronized.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True
    )

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = loss_of(tokens_BS.to(device), labels_BS.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
