"""The gradient norm of two tensor-parallel ranks at the ZeRO stages in bf16."""

import torch
import torch.distributed as dist
from frame import deepspeed_engine, load_deepspeed, run_ranks, verdict

GRADIENTS = (3.0, 4.0)
"""Of the parts of a matrix that the ranks have. Together their norm is 5."""
STAGES = (0, 1)


class Mesh:
    """What DeepSpeed asks of Megatron's `mpu`: all ranks share the layers, none the samples."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._alone = [dist.new_group([one]) for one in range(2)][rank]

    def get_model_parallel_rank(self) -> int:
        return self._rank

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._alone


def step(rank: int) -> list[float]:
    """The reported norm at each stage."""
    load_deepspeed().init_distributed("gloo")
    norms = []
    for stage in STAGES:
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.tensor_model_parallel = True
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        engine = deepspeed_engine(
            model, optimizer, mpu=Mesh(rank), gradient_clipping=1e9, **settings
        )
        engine.backward(engine(torch.full((1, 1), GRADIENTS[rank], dtype=torch.bfloat16)).sum())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


if __name__ == "__main__":
    norms, _ = run_ranks(step, size=2)
    figures = ", ".join(
        f"{norm:.2f} at stage {stage}" for stage, norm in zip(STAGES, norms, strict=True)
    )
    verdict(any(abs(norm - 5) > 0.05 for norm in norms), f"norm {figures} instead of 5")
