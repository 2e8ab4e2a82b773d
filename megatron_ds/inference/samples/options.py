"""Options of tools/generate_samples_gpt.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_ds.config import ModelConfig
from megatron_ds.config.checks import file_problems, output_problems
from megatron_ds.config.fields import (
    ANY_VALUE,
    exclusive_problem,
    no_effect_problem,
    option_field,
    option_group,
    when,
)
from megatron_ds.config.problems import Problem, option
from megatron_ds.inference.cli import GenerationOptions
from megatron_ds.inference.generation.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_ds.inference.generation.sequences import GenerationConfig

DEFAULT_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Options(GenerationOptions):
    """Continues prompts with a trained GPT, or samples texts without a prompt.

    Without --prompt, --sample-input-file and --num-samples, prompts are read from the terminal,
    until the end of the input or the prompt "stop".

    Flags of pretrain_gpt.py are accepted, too: tokenizer flags (--tokenizer-type, --vocab-file,
    --merge-file, --tokenizer-model) override the checkpoint's, model flags must agree with the
    checkpoint, other flags have no effect.
    """

    PROGRAM: ClassVar[str] = "generate_samples_gpt.py"
    OTHER_NAMES: ClassVar[tuple[str, ...]] = ("generate_samples_gpt2.py",)

    prompt: tuple[str, ...] = option_field((), nargs="*", aliases=("prompts",), repeatable=True)
    """prompts; repeatable."""
    sample_input_file: str | None = option_field(None, metavar="FILE")
    """File with one prompt per line, or JSON lines (.jsonl): strings, or objects with the key
    prompt or text."""
    sample_output_file: str | None = option_field(None, metavar="FILE")
    """Output file for prompts and continuations as text (default: the terminal, or
    SAMPLE_INPUT_FILE.out)."""
    num_samples: int = option_field(0, minimum=0)
    """Number of samples to generate without a prompt (starting from the end-of-document token)."""
    genfile: str | None = option_field(None, metavar="FILE")
    """Output file for JSON lines with prompt (if there is one), text, length in tokens,
    finished."""
    logprobs: bool = option_field(False, only_with=when(genfile=ANY_VALUE))
    """Add to each line of --genfile the tokens of prompt and text, and the log-probabilities of all
    but the first."""
    out_seq_length: int | None = option_field(
        None,
        help=f"new tokens per prompt (default: up to {DEFAULT_NEW_TOKENS}, within the training "
        "run's sequence length; with rope, alibi or no positions N may exceed it)",
        aliases=("tokens-to-generate",),
        minimum=1,
    )
    micro_batch_size: int = option_field(8, minimum=1)
    """Prompts per batch; does not affect the output."""
    kv_cache: bool = option_field(True, aliases=("recompute",))
    """`--no-kv-cache`: disable the KV cache and recompute the entire sequence for each token."""
    sampling: SamplingParams = option_group(SamplingParams())

    def generation_config(
        self, model: ModelConfig, eod: int, further_ends: frozenset[int] = frozenset()
    ) -> GenerationConfig:
        """Returns the generation settings; the training run's length without --out-seq-length."""
        from megatron_ds.inference.generation.sequences import GenerationConfig

        max_length = model.seq_length if self.out_seq_length is None else None
        new_tokens = self.out_seq_length or DEFAULT_NEW_TOKENS
        return GenerationConfig(
            new_tokens,
            self.sampling,
            eod,
            max_length,
            use_cache=self.kv_cache,
            logprobs=self.scores_texts,
            prompt_logprobs=self.scores_texts,
            further_ends=further_ends,
        )

    @property
    def output_file(self) -> tuple[str, str] | None:
        """Option field and path of the output; None for the terminal."""
        for name in ("genfile", "sample_output_file"):
            if (path := getattr(self, name)) is not None:
                return name, path
        source = self.sample_input_file
        return None if source is None else ("sample_input_file", f"{source}.out")

    @property
    def scores_texts(self) -> bool:
        return self.logprobs and self.genfile is not None

    @property
    def is_interactive(self) -> bool:
        return not (self.prompt or self.sample_input_file or self.num_samples)

    def problems(self) -> Iterator[Problem]:
        yield from self.checkpoint.problems()
        yield from self.sampling.problems()
        sources = ("prompt", "sample_input_file", "num_samples")
        if sum(bool(getattr(self, name)) for name in sources) > 1:
            flags = ", ".join(map(option, sources))
            yield Problem("several-prompt-sources", *sources, flags=flags)
        if self.sample_input_file is not None:
            yield from file_problems("sample_input_file", self.sample_input_file)
        if self.genfile is not None and self.sample_output_file is not None:
            yield exclusive_problem("genfile", "sample_output_file")
        if (output_file := self.output_file) is not None:
            name, path = output_file
            yield from output_problems(name, path)
            source = self.sample_input_file
            if source is not None and os.path.realpath(path) == os.path.realpath(source):
                yield Problem("output-is-prompt-file", name, path=path)

    def warnings(self) -> Iterator[Problem]:
        names = [name for name in ("temperature", "top_k", "top_p") if name in self.given]
        if self.sampling.greedy and names:
            yield no_effect_problem(*names, reason=f"with {option('greedy')}")
