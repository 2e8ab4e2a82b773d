"""Options of the tools that load a run's checkpoint, and how pretrain_gpt.py's flags apply.

The tokenizer's flags override the checkpoint's, the model's must agree with it, and all others
have no effect. Also reports and errors of these tools. Loads no torch before a checkpoint's
tokenizer is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megatron_ds.cli.command import fail, parse, table_of
from megatron_ds.config import Config, ModelConfig, fields_that_only_decide, flag_of
from megatron_ds.config.fields import Decides, option_field, option_group
from megatron_ds.config.problems import Problem, option
from megatron_ds.conversion.foreign.recognition import location_problems
from megatron_ds.launch import environment, output
from megatron_ds.launch.ranks import distributed
from megatron_ds.loading.merge import MergeOptions, merge_sources, open_all

if TYPE_CHECKING:
    from megatron_ds.conversion.source import SourceCheckpoint
    from megatron_ds.model.gpt import GPTModel
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.tokenizer import Tokenizer

T = TypeVar("T")

ENDLESS_MINUTES = 60.0 * 24 * 365
"""Timeout of the other ranks while a person types on rank 0."""
RUNTIME_FIELDS = ("distributed_backend", "distributed_timeout_minutes")
"""Fields of the run that generation uses, other than the fields of model and tokenizer."""
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class CheckpointOptions:
    """The checkpoint and how it is loaded."""

    load: str = option_field("", metavar="FOLDER", required=True)
    """Folder of a training run's checkpoints (--save), of which the last one is loaded, a single
    checkpoint, or weights in any format that tools/convert_checkpoint.py reads; hf:FOLDER names the
    format, and hf:OWNER/NAME a model of the Hugging Face Hub. FOLDER may be a URL such as
    s3://BUCKET/FOLDER."""
    merge_with: tuple[str, ...] = option_field((), nargs="*", metavar="FOLDER")
    """Further checkpoints of the same model, whose weights are merged with those of --load, as by
    tools/merge_checkpoints.py, but not written."""
    merging: MergeOptions = option_group(MergeOptions())
    tensor_model_parallel_size: int | None = option_field(None, aliases=("model-parallel-size",))
    """Degree of tensor parallelism; may differ from training (default: number of processes)."""
    fp32: bool = option_field(False)
    """Compute in fp32 instead of the type used in training."""
    bf16: bool = option_field(False)
    """Compute in bf16 instead of the type used in training."""
    fp16: bool = option_field(False)
    """Compute in fp16 instead of the type used in training."""

    @property
    def precision(self) -> str | None:
        """Data type of the computation; None for the one used in training."""
        return next((name for name in PRECISIONS if getattr(self, name)), None)

    def problems(self, *, is_replicated: bool = False) -> Iterator[Problem]:
        """
        Args:
            is_replicated: Whether several groups of processes may have the model.
        """
        tp_size = self.tensor_model_parallel_size
        processes = environment.world_size()
        for location in (self.load, *self.merge_with):
            yield from location_problems(location)
        if is_replicated and processes % (tp_size or 1):
            yield Problem("evaluation-needs-whole-models", tp_size=tp_size, processes=processes)
        elif not is_replicated and tp_size not in (None, processes):
            yield Problem("generation-needs-all-processes", tp_size=tp_size, processes=processes)
        if sum(getattr(self, name) for name in PRECISIONS) > 1:
            flags = ", ".join(map(option, PRECISIONS))
            yield Problem("several-precisions", flags=flags)


@dataclass(frozen=True)
class GenerationOptions:
    """Base of the options of the tools that load a checkpoint."""

    PEERS: ClassVar[str] = "pretrain_gpt"

    training: Config = option_group(Config(), hidden=True)
    """The flags of pretrain_gpt.py that were given."""
    given: frozenset[str] = frozenset()
    checkpoint: CheckpointOptions = option_group(CheckpointOptions())

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size: all processes together have the model."""
        return environment.world_size()

    @property
    def training_fields(self) -> frozenset[str]:
        """The given fields that are not the tool's own."""
        groups = table_of(type(self)).shown
        return self.given - {flag.field for group in groups for flag in group.flags}

    def given_in(self, group: str) -> dict[str, Any]:
        """The given values of a group of the run's configuration."""
        values = vars(getattr(self.training, group))
        return {name: values[name] for name in sorted(self.training_fields & values.keys())}

    @property
    def ineffective_flags(self) -> list[str]:
        """The given flags of the run that have no effect on generation."""
        used = {*self.given_in("model"), *self.given_in("tokenizer"), *RUNTIME_FIELDS}
        used.add("checkpoint_staging_dir")
        return sorted(flag_of(name) for name in self.training_fields - used)


def model_conflicts(
    values: Mapping[str, Any], model: ModelConfig, null_tokenizer: bool
) -> Iterator[Problem]:
    """Model flags that differ from the checkpoint's model."""
    effective = {
        "ffn_hidden_size": model.mlp_hidden_size,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.num_positions,
        # A NullTokenizer's end-of-document id is added to the flag's number.
        "vocab_size": model.vocab_size - null_tokenizer,
    }
    # Without a meaning for generation, so that any value agrees with the checkpoint.
    free = fields_that_only_decide(Decides.TRAINING | Decides.INITIAL_VALUES | Decides.LAYOUT)
    for name, value in values.items():
        saved = effective.get(name, getattr(model, name))
        if value != saved and name not in free:
            yield Problem("flag-differs-from-checkpoint", name, value=value, saved=saved)


def run_program(options: type[T], run: Callable[[T], None], argv: Sequence[str]) -> None:
    """Runs a program that one or several processes are; the first one prints its problems.

    Args:
        options: Dataclass of its options.
        run: The program.
        argv: The arguments without its name.
    """
    with output.exit_without_traceback():
        environment.adopt_ranks()
        parsed = parse(options, argv, rank=environment.rank())
        environment.prepare_environment()
        run(parsed)


def open_checkpoint(
    options: GenerationOptions, refuse: Callable[[list[Problem]], object] | None = None
) -> tuple[SourceCheckpoint, ModelConfig, Tokenizer]:
    """Selects the checkpoint, and reads its model's configuration and its tokenizer.

    Args:
        options: Options of the tool.
        refuse: Raises the problems of flags that contradict the checkpoint. None: they are
            printed, and end the program.

    Raises:
        UserError: If there is no checkpoint, or its tokenizer cannot be built.
        SystemExit: With status 2, if flags and checkpoint contradict each other.
    """
    from megatron_ds.conversion.source import ReadOptions
    from megatron_ds.inference import load_checkpoint

    locations = (options.checkpoint.load, *options.checkpoint.merge_with)
    staging = options.training.checkpoint.checkpoint_staging_dir
    sources = open_all(locations, ReadOptions(warn=log_rank0), staging)
    source = merge_sources(sources, options.checkpoint.merging)
    model = source.settings.model
    config = load_checkpoint.tokenizer_config(source, options.given_in("tokenizer"))
    null_tokenizer = config.tokenizer_type == "NullTokenizer"
    problems = [
        *model_conflicts(options.given_in("model"), model, null_tokenizer),
        *model.problems(options.tp_size),
        *config.problems(model.vocab_size),
    ]
    if problems:
        if refuse is not None:
            refuse(problems)
        fail(problems, table_of(type(options)), rank=environment.rank())
    if options.ineffective_flags:
        flags = ", ".join(options.ineffective_flags)
        log_rank0(f"WARNING: {Problem('no-effect-on-generation', flags=flags).render()}")
    may_be_smaller = source.settings.may_have_unused_rows
    tokenizer = load_checkpoint.load_tokenizer(config, model, may_be_smaller=may_be_smaller)
    tokenizer.further_ends = load_checkpoint.end_tokens(source, tokenizer) - {tokenizer.eod}
    if source.settings.may_have_padding:
        source = source.with_vocab(tokenizer.vocab_size)
        model = source.settings.model
    return source, model, tokenizer


@contextlib.contextmanager
def loaded_model(
    options: GenerationOptions, source: SourceCheckpoint, *, endless: bool = False
) -> Iterator[tuple[GPTModel, Mesh]]:
    """Initializes the process group, and shards the model over it. Destroys it at the end.

    Args:
        options: Options of the loading of the model.
        source: The weights.
        endless: Whether ranks wait for each other indefinitely, unless a flag limits it.
    """
    from megatron_ds.conversion.registry import open_source
    from megatron_ds.inference import load_checkpoint
    from megatron_ds.inference.generation.packed_weights import pack_weights
    from megatron_ds.model.experts.grouped import try_grouped_matmuls
    from megatron_ds.model.kernels.half_products import replace_slow_products
    from megatron_ds.parallel.mesh import Mesh

    config = options.training.runtime
    if endless and "distributed_timeout_minutes" not in options.given:
        config = dataclasses.replace(config, distributed_timeout_minutes=ENDLESS_MINUTES)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints the ops that it loads
        here = distributed.init_distributed(config)
    try:
        mesh = Mesh.build(options.tp_size)
        # A run may save meanwhile: all ranks use the checkpoints of the first one.
        paths = broadcast_from_rank0(source.paths)
        if paths != source.paths:
            sources = [open_source(path) for path in paths]
            source = merge_sources(sources, options.checkpoint.merging)
        log_rank0(f"loading the checkpoint {', '.join(map(str, paths))}")
        precision = options.checkpoint.precision
        model = load_checkpoint.load_model(source, mesh, here.device, precision=precision)
        which = next(model.parameters()).dtype, here.device
        for note in filter(
            None, (replace_slow_products(*which), try_grouped_matmuls(model, *which))
        ):
            log_rank0(f"WARNING: {note.render()}")
        source.release()
        pack_weights(model)
        yield model, mesh
    finally:
        distributed.destroy_process_group()


def broadcast_from_rank0(value: T) -> T:
    """The first rank's value, on every rank."""
    if environment.world_size() == 1:
        # gloo's thread may still hold a sent message when the process exits, which aborts it.
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def log_rank0(text: str) -> None:
    """Print a line to the standard error on the first rank."""
    if environment.rank() == 0:
        print(text, file=sys.stderr, flush=True)
