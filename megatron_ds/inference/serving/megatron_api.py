"""Megatron's `PUT /api`: requests to jobs, results to responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_ds.config.problems import user_error
from megatron_ds.inference.generation.beam import BeamSearchConfig, Hypothesis
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import TextSequence
from megatron_ds.inference.serving.api_schema import Defaults, read
from megatron_ds.inference.serving.scheduler import Finished
from megatron_ds.inference.serving.service import GenerationJob, TextGenerationService, random_seed


@dataclass(frozen=True)
class MegatronApi:
    """Serves Megatron's clients."""

    service: TextGenerationService
    defaults: Defaults

    def read(self, body: bytes) -> GenerationJob:
        """
        Raises:
            UserError: If the request is invalid or does not fit the tokenizer or the model.
        """
        request = read(body, self.defaults)
        service = self.service
        # As in Megatron, a text starts after the end of another.
        prompts = service.encode_prompts(
            request.prompts, request.tokens_to_generate, add_bos=request.add_BOS
        )
        limit = request.tokens_to_generate
        new_tokens = self.defaults.tokens_to_generate if limit is None else limit
        beam = None
        stop_token = request.stop_token
        vocab = service.model.config.vocab_size
        if stop_token is not None and stop_token >= vocab:
            raise user_error("stop-token-out-of-range", stop_token=stop_token, vocab=vocab)
        if request.beam_width is not None:
            further = service.tokenizer.further_ends if stop_token is None else frozenset()
            stop_token = service.tokenizer.eod if stop_token is None else stop_token
            beam = BeamSearchConfig(
                new_tokens,
                request.beam_width,
                stop_token,
                request.length_penalty,
                further_stops=further,
            )
        sampling = SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=random_seed() if request.random_seed is None else request.random_seed,
            top_p_decay=request.top_p_decay,
            top_p_bound=request.top_p_bound,
        )
        rules = request.stop_on_eol, request.stop_on_double_eol, request.prevent_newline_after_colon
        return GenerationJob(
            prompts,
            new_tokens,
            sampling,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs,
            top_n=request.top_n_logprobs,
            newline_rules=rules,
            beam=beam,
            log=not request.no_log,
        )

    def response(self, job: GenerationJob, finished: Finished) -> dict[str, Any]:
        """The JSON object of Megatron's server."""
        tokenizer = self.service.tokenizer
        result = finished.result
        decode = tokenizer.decode
        beams = [item for item in result if isinstance(item, Hypothesis)]
        sequences = [item for item in result if isinstance(item, TextSequence)]
        texts = [sequence.ids for sequence in sequences] or [
            [*job.prompts[0], *beam.ids] for beam in beams
        ]
        response: dict[str, Any] = {
            "text": [decode(tokenizer.without_bos(ids)) for ids in texts],
            "segments": [[decode([token]) for token in ids] for ids in texts],
            "tokens": texts,
        }
        if job.beam is not None:
            return {**response, "scores": [beam.score for beam in beams]}
        scores = [sequence.scores for sequence in sequences]
        response["logprobs"] = [score.logprobs for score in scores] if job.logprobs else None
        if job.top_n:
            response["top_n_logprobs"] = [
                [by_text(decode, top) for top in score.top] for score in scores
            ]
        return response

    def events(self, job: GenerationJob) -> NoReturn:
        raise NotImplementedError("Megatron's interface does not stream")

    @staticmethod
    def error(message: str, status: int, codes: Sequence[str] = ()) -> dict[str, Any]:
        """The JSON object of an error."""
        return {"message": message} | ({"codes": list(codes)} if codes else {})


def by_text(
    decode: Callable[[Sequence[int]], str], top: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Log-probabilities by the texts of their ids, in the same order.

    Ids that are parts of characters may share a text: the first, most probable one is kept.
    """
    by_text: dict[str, float] = {}
    for token, value in top:
        by_text.setdefault(decode([token]), value)
    return by_text
