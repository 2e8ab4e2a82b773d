"""Merge the weights of several checkpoints of one model: mean, moving average, emulated decay."""

from __future__ import annotations

from megatron_ds import cli
from megatron_ds.cli.progress import tensor_progress
from megatron_ds.launch.output import print_error
from megatron_ds.loading.merge import Options


def work(options: Options) -> None:
    source = options.open(print_error)
    with tensor_progress("merging", source.nbytes) as tensors:
        options.write(source, print_error, lambda name, size: tensors.add(size))
    print(f"merged {tensors.count} tensors of {', '.join(map(str, source.paths))}")
    print(f"wrote {options.save}")


main = cli.program(Options, work)
