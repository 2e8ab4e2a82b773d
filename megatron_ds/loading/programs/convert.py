"""Convert the weights of a checkpoint to another format."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ds import cli
from megatron_ds.cli.progress import tensor_progress
from megatron_ds.config.problems import Problem, raise_if_any
from megatron_ds.conversion.weights_locations import reading_weights
from megatron_ds.engine.ds_config.fields import as_flag
from megatron_ds.launch.output import print_error
from megatron_ds.launch.process.program_start import importing
from megatron_ds.loading.locations import staged_location
from megatron_ds.loading.programs.convert_options import MEGATRON_FORMATS, QUANTIZED, Options


def convert_checkpoint(options: Options) -> None:
    """Converts a checkpoint, and verifies the result if the options say so.

    Raises:
        UserError: If the checkpoint cannot be read, or the format lacks a part of the model.
        OSError: If the disk fails.
    """
    start = time.perf_counter()
    location = staged_location(options.load, options.checkpoint_staging_dir, print_error)
    name, folder = dataclasses.replace(options, load=location).source
    # torch takes seconds to import, in which weights are read.
    with reading_weights(folder) as pending:
        with importing(), contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints a warning
            from megatron_ds.conversion import registry
            from megatron_ds.conversion.convert import verify, with_training
            from megatron_ds.conversion.native import DTYPES
            from megatron_ds.conversion.source import ReadOptions, WriteOptions
        has_states = options.optimizer_states and options.target_format in MEGATRON_FORMATS
        reading = ReadOptions(
            print_error,
            optimizer=has_states,
            masters=options.dtype in ("fp32", QUANTIZED),
            pending=pending,
            model=dataclasses.asdict(options.model),
            given=options.given,
        )
        source = registry.open_source(folder, name, reading)
        raise_if_any(_contradictions(options, source.settings.fixed, folder))
        if has_states:
            source = with_training(source)
        source = source.to(DTYPES.get(options.dtype or ""))
        target = Path(options.save)
        writing = WriteOptions(
            options.hf_model_type,
            tp_size=options.target_tensor_parallel_size,
            pp_size=options.target_pipeline_parallel_size,
            ep_size=options.target_expert_parallel_size,
            adam=options.target_adam,
            engines=options.engine_names,
            quantization=QUANTIZED if options.dtype == QUANTIZED else None,
            warn=print_error,
        )
        total = source.nbytes
        with tensor_progress("converting", total) as tensors:
            registry.write(
                source, target, options.target_format, writing, lambda name, size: tensors.add(size)
            )
    seconds = max(time.perf_counter() - start, 1e-9)
    print(
        f"{source.format} to {options.target_format}: {tensors.count} tensors, "
        f"{total / 1e6:.1f} MB in {seconds:.1f} s ({total / 1e6 / seconds:.1f} MB/s)"
    )
    if options.verify:
        error = verify(source, target, options.target_format)
        print(f"verified: the logits of both models differ by {error:.1e} of the largest one")
    print(f"wrote {target}")


def _contradictions(
    options: Options, settings: Mapping[str, Any], folder: Path
) -> Iterator[Problem]:
    """Yields the options of the model that were given and that the checkpoint has otherwise."""
    for name in sorted(options.given & settings.keys()):
        value = getattr(options.model, name)
        if value != settings[name]:
            texts = {"given": as_flag(name, value), "saved": as_flag(name, settings[name])}
            yield Problem("foreign-setting-differs", name, path=folder, **texts)


main = cli.program(Options, convert_checkpoint)
