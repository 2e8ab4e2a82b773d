"""The order of DistributedSampler in two epochs, and what it does with an odd number of samples."""

from frame import verdict
from torch.utils.data.distributed import DistributedSampler

if __name__ == "__main__":
    samplers = [
        DistributedSampler(range(11), num_replicas=4, rank=rank, shuffle=True) for rank in range(4)
    ]
    epochs = [[list(sampler) for sampler in samplers] for _ in range(2)]
    read = [sample for order in epochs[0] for sample in order]
    is_wrong = epochs[0] == epochs[1] or len(read) > 11
    order = "the same" if epochs[0] == epochs[1] else "another"
    verdict(is_wrong, f"the second epoch has {order} order; {len(read)} of 11 samples are read")
