"""A step of Muon on four square matrices, with and without clipping to a norm of 1."""

import torch
from frame import deepspeed_engine, run_ranks, verdict

WIDTH = 128


def step(rank: int) -> list[tuple[float, float]]:
    """The reported gradient norm, and how far the weights go, without and with clipping."""
    results = []
    for clipping in (0.0, 1.0):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        before = [layer.weight.detach().clone() for layer in layers]
        params = {"lr": 0.02, "momentum": 0.95}
        engine = deepspeed_engine(
            model,
            zero_optimization={"stage": 1},
            optimizer={"type": "Muon", "params": params},
            gradient_clipping=clipping,
        )
        engine.backward(1e-3 * engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()
        moved = [(layer.weight - old).norm() for layer, old in zip(layers, before, strict=True)]
        distance = torch.stack(moved).norm().item()
        results.append((float(engine.get_global_grad_norm()), distance))
    return results


if __name__ == "__main__":
    (results,) = run_ranks(step)
    (_, free), (norm, clipped) = results
    figures = (
        f"the weights go by {clipped:.4f} instead of {free:.4f}, at a reported norm of {norm:.2f}"
    )
    verdict(clipped < 0.9 * free, figures)
