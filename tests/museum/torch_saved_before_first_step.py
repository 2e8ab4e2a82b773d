"""AdamW's first update, with and without the state dict of a checkpoint before it."""

import torch
from frame import verdict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

RATE = 0.01
"""Size of the first update of Adam, whatever the gradient is."""


def first_update(*, is_saved: bool) -> float:
    """The largest change of a weight in the first step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    before = model.weight.detach().clone()
    if is_saved:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return (model.weight.detach() - before).abs().max().item()


if __name__ == "__main__":
    alone = first_update(is_saved=False)
    saved = first_update(is_saved=True)
    verdict(
        abs(saved - alone) > 0.1 * RATE,
        f"first update of {saved:.4f} after a save of step 0, and {alone:.4f} without one",
    )
