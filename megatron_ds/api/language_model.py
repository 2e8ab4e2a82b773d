"""A trained model in a Python program: generates, scores, computes logits, exports.

Shapes: B sequences, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from megatron_ds.config.problems import ignore
from megatron_ds.conversion import registry
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint, WriteOptions
from megatron_ds.evaluation.scoring import Scorer
from megatron_ds.evaluation.tasks import PERPLEXITY, Task, Text
from megatron_ds.inference.generate import continue_prompts, stream_tokens
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from megatron_ds.inference.generation.stop_rules import StopStrings
from megatron_ds.inference.generation.token_text import TokenText
from megatron_ds.inference.prompts import encode_prompts
from megatron_ds.inference.samples.options import DEFAULT_NEW_TOKENS
from megatron_ds.launch.output import print_error
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer import Tokenizer

BATCH_SIZE = 8
"""Prompts or windows of a forward pass, which do not depend on it."""


class LanguageModel:
    """A trained model with its tokenizer, on the device of this process.

    `megatron_ds.load` makes it.

    Attributes:
        model ([`GPTModel`]):
            The `torch.nn.Module`, in evaluation mode.
        tokenizer ([`Tokenizer`]):
            Has `encode(text)`, `decode(ids)`, `eod` and `vocab_size`.
        path ([`Path`]):
            Folder of the checkpoint.
        iteration (`int`, *optional*):
            Iteration of the run that saved it; `None` for weights alone.
    """

    def __init__(
        self, model: GPTModel, tokenizer: Tokenizer, source: SourceCheckpoint, mesh: Mesh
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.path = source.path
        self.iteration = source.iteration
        self._format = source.format
        self._mesh = mesh

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return next(self.model.parameters()).dtype

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied output layer is not counted twice."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<{self.num_parameters:,} parameters, {dtype} on {self.device}, from {self.path}>"

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        greedy: bool = False,
        seed: int = SamplingParams.seed,
        stop: str | Sequence[str] = (),
    ) -> str: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        greedy: bool = False,
        seed: int = SamplingParams.seed,
        stop: str | Sequence[str] = (),
    ) -> list[str]: ...

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        greedy: bool = False,
        seed: int = SamplingParams.seed,
        stop: str | Sequence[str] = (),
    ) -> str | list[str]:
        """Continues a prompt, or several, as `megatron-ds generate` and the server do.

        Args:
            prompt (`str` or a list of `str`):
                Text to continue. Several prompts are computed together, and each has the
                continuation that it has in `megatron-ds generate`.
            max_new_tokens (`int`, *optional*):
                Most tokens of a continuation. Defaults to 1024, within the sequence length of the
                training.
            temperature (`float`, *optional*, defaults to 1.0):
                Values below 1 favor probable tokens.
            top_k (`int`, *optional*, defaults to 0):
                Samples from the `top_k` most probable tokens; 0 is off.
            top_p (`float`, *optional*, defaults to 0.0):
                Samples from the smallest set of tokens with at least this probability; 0 is off.
            greedy (`bool`, *optional*, defaults to `False`):
                Takes the most probable token instead of sampling.
            seed (`int`, *optional*, defaults to 1234):
                The same seed gives the same text.
            stop (`str` or a sequence of `str`, *optional*):
                Texts that end a continuation, and are not part of it.

        Returns:
            `str`, or a list of `str` for several prompts: The continuations, without the prompt and
            without the token that ended them.

        Raises:
            UserError: If a prompt is empty or too long, or a parameter is invalid.
        """
        sampling = SamplingParams(temperature, top_k, top_p, greedy, seed)
        config = self._generation_config(max_new_tokens, sampling, _strings(stop))
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        prompts = [item.ids for item in encode_prompts(texts, self.tokenizer)]
        results: list[str] = []
        for start in range(0, len(prompts), BATCH_SIZE):
            batch = prompts[start : start + BATCH_SIZE]
            indexes = range(start, start + len(batch))
            for sequence in continue_prompts(self.model, batch, config, indexes=indexes):
                results.append(self._text(sequence.new_ids, _strings(stop)))
        return results[0] if isinstance(prompt, str) else results

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        greedy: bool = False,
        seed: int = SamplingParams.seed,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """Continues a prompt, and yields the text as soon as its characters are complete.

        The arguments are those of `generate`, whose text the pieces together are. Ending the
        iteration ends the generation.

        Raises:
            UserError: Before the first piece, if the prompt or a parameter is invalid.
        """
        sampling = SamplingParams(temperature, top_k, top_p, greedy, seed)
        config = self._generation_config(max_new_tokens, sampling, _strings(stop))
        (item,) = encode_prompts([prompt], self.tokenizer)
        tokens = stream_tokens(self.model, item.ids, config)
        return self._pieces(tokens, TokenText(self.tokenizer.decode, _strings(stop)))

    def loss(self, text: str | Sequence[str], *, stride: int = 32) -> float:
        """The mean loss of a text, or of several together, as `megatron-ds evaluate` has it.

        Args:
            text (`str` or a sequence of `str`):
                Each is a document of its own.
            stride (`int`, *optional*, defaults to 32):
                Tokens by which the window of a long text is moved; all but these give context.

        Returns:
            `float`: Nats per token. Its exponential is the perplexity.

        Raises:
            UserError: If there is nothing to score.
        """
        length = self.model.config.seq_length
        task = Task(PERPLEXITY, self.tokenizer, length, max(1, min(stride, length)))
        documents = (Text(item) for item in _strings(text) if item.strip())
        totals = task.evaluate(documents, Scorer(self.model, self._mesh, BATCH_SIZE).score)
        return totals.nats / totals.tokens

    @torch.no_grad()
    def logits(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """The logits of each position's next token.

        Args:
            ids (a sequence of `int`, of sequences of equal length, or a `Tensor`):
                Token ids, `[S]` or `[B, S]`.

        Returns:
            `Tensor`: fp32 logits, `[S, V]` or `[B, S, V]`, on the device of the model.

        Raises:
            UserError: If an id is outside of the vocabulary, or the sequence is too long.
        """
        tokens = torch.as_tensor(ids, dtype=torch.long, device=self.device)
        logits_BSV: Tensor = self.model(tokens if tokens.dim() == 2 else tokens[None])
        logits_BSV = logits_BSV[..., : self.model.config.vocab_size]
        return logits_BSV if tokens.dim() == 2 else logits_BSV[0]

    def to_hf(self, folder: str | Path, *, model_type: str | None = None) -> Path:
        """Writes the model and its tokenizer as a folder of Hugging Face.

        The files are those of `megatron-ds convert --to hf`. The folder appears complete or not at
        all.

        Args:
            folder (`str` or `Path`):
                New folder.
            model_type (`str`, *optional*):
                Family, such as `"llama"`. Defaults to the original one, or the first that has the
                parts of the model.

        Returns:
            `Path`: The folder.

        Raises:
            UserError: If it has files already, or no family has the parts of the model.
            OSError: If the disk fails.
        """
        target = Path(folder)
        source = registry.open_source(self.path, self._format, ReadOptions(print_error))
        writing = WriteOptions(model_type, warn=print_error)
        try:
            registry.write(source, target, "hf", writing, ignore)
        finally:
            source.release()
        return target

    def _generation_config(
        self, max_new_tokens: int | None, sampling: SamplingParams, stops: tuple[str, ...]
    ) -> GenerationConfig:
        is_open = max_new_tokens is None
        decode = self.tokenizer.decode
        return GenerationConfig(
            DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
            sampling,
            self.tokenizer.eod,
            self.model.config.seq_length if is_open else None,
            is_complete=StopStrings(decode, stops) if stops else None,
            further_ends=self.tokenizer.further_ends,
        )

    def _text(self, ids: Sequence[int], stops: tuple[str, ...]) -> str:
        """The text of new tokens, as far as the first stop."""
        ended = ids[-1:] and ids[-1] in self.tokenizer.ends
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        ends = [position for stop in stops if (position := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _pieces(self, tokens: Iterator[int], text: TokenText) -> Iterator[str]:
        for token in tokens:
            if token not in self.tokenizer.ends and (piece := text.add(token)):
                yield piece
        if piece := text.finish():
            yield piece


def _strings(text: str | Sequence[str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else tuple(text)
