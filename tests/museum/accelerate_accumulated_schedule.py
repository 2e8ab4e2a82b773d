"""Rates of four optimizer steps of four micro-batches each, by a schedule that ends after four."""

import torch
from accelerate import Accelerator
from frame import verdict

STEPS = 4
ACCUMULATED = 4

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    batches = torch.utils.data.DataLoader(torch.randn(STEPS * ACCUMULATED, 2))
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    rates = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    right = [1 - step / STEPS for step in range(STEPS)]
    verdict(rates != right, f"rates {rates}, right are {right}")
