"""The model as one of lm-evaluation-harness, which brings hundreds of tasks.

`tools/evaluate.py --tasks` runs it. `python -m megatron_ds.evaluation.harness` is the harness's own
command line with the model `megatron_ds`: `run --model megatron_ds --model_args load=FOLDER`.
Every rank runs the harness, and the ranks share the requests. Harness: Gao et al.,
https://github.com/EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import datasets
from lm_eval import simple_evaluate, utils
from lm_eval.api import model as model_module
from lm_eval.api import task as task_module
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from megatron_ds import cli
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.evaluation.options import ModelOptions, Options
from megatron_ds.evaluation.scoring import ScoredText, Scorer
from megatron_ds.inference.cli import broadcast_from_rank0, loaded_model, open_checkpoint
from megatron_ds.inference.generate import generate
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from megatron_ds.inference.generation.stop_rules import StopStrings
from megatron_ds.launch import environment
from megatron_ds.parallel.rng import stable_seed

if TYPE_CHECKING:
    from megatron_ds.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 256


@register_model("megatron_ds")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model for the harness.

    Args:
        load: The flag --load, if the harness creates the model.
        scorer: A model that is loaded already.
        tokenizer: Its tokenizer.
        batch_size: Requests per batch, if the harness creates the model.
        flags: Other flags of tools/evaluate.py, without hyphens.
    """

    def __init__(
        self,
        load: str = "",
        *,
        scorer: Scorer | None = None,
        tokenizer: Tokenizer | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
        **flags: Any,
    ) -> None:
        super().__init__()
        self._open = contextlib.ExitStack()
        if scorer is None or tokenizer is None:
            scorer, tokenizer = self._load(load, batch_size, flags)
            atexit.register(self.close)
        self._scorer = scorer
        self._tokens = tokenizer
        self._length = scorer.model.config.seq_length

    def close(self) -> None:
        """Destroys the process group of a model that the harness has created."""
        self._open.close()

    @property
    def eot_token_id(self) -> int:
        return self._tokens.eod

    @property
    def prefix_token_id(self) -> int:
        return self._tokens.prefix

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.fingerprint.digest

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        ids = self._tokens.encode(string)
        return ids if add_special_tokens is False else self._tokens.begin(ids)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of entire texts, in windows that do not overlap."""
        texts = []
        counts = []
        for (text,) in (request.args for request in requests):
            cut = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._length,
                context_len=1,
            )
            windows = [((text, ""), *utils.make_disjoint_window(window)) for window in cut]
            texts += windows
            counts.append(len(windows))
        scores = iter(self._loglikelihood_tokens(texts))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # Of a text that the model cannot read at a time, the end is scored.
        texts = (
            ScoredText(
                [*context, *continuation][-(self._length + 1) :],
                min(len(continuation), self._length),
            )
            for _, context, continuation in requests
        )
        results = [(score.logprob, score.is_greedy) for score in self._scorer.score(texts)]
        for (pair, _, _), result in zip(requests, results, strict=True):
            if pair[1]:
                self.cache_hook.add_partial("loglikelihood", pair, result)
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to their stop sequences; requests with equal settings share batches."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        texts: dict[int, str] = {}
        for numbers in groups.values():
            settings = requests[numbers[0]].args[1]
            contexts = [requests[index].args[0] for index in numbers]
            for index, text in zip(numbers, self._continue(contexts, settings), strict=True):
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                texts[index] = text
        return [texts[index] for index in range(len(requests))]

    def _continue(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        values = normalize_gen_kwargs(settings, DEFAULT_NEW_TOKENS)
        stops = tuple(handle_stop_sequences(values.get("until"), eos=None))
        new_tokens = min(int(values["max_gen_toks"]), self._length - 1)
        sampling = SamplingParams(greedy=True)
        if values.get("do_sample") or values.get("temperature"):
            names = {"temperature", "top_k", "top_p"} & values.keys()
            sampling = SamplingParams(**{name: values[name] for name in names})

        is_complete = StopStrings(self._tokens.decode, stops) if stops else None
        config = GenerationConfig(
            new_tokens,
            sampling,
            self.eot_token_id,
            is_complete=is_complete,
            further_ends=self._tokens.further_ends,
        )

        def continuations(batch: Sequence[tuple[int, list[int]]]) -> list[str]:
            numbers, prompts = zip(*batch, strict=True)
            texts = generate(self._scorer.model, prompts, config, indexes=numbers)
            return [self._cut(ids, stops) for ids in texts]

        room = self._length - new_tokens
        prompts = [self.tok_encode(text)[-room:] or [self.prefix_token_id] for text in contexts]
        # A sample depends on its prompt, and on how often the prompt was asked before, alone.
        asked: Counter[tuple[int, ...]] = Counter()
        numbered = []
        for prompt in prompts:
            numbered.append((stable_seed(*prompt, asked[tuple(prompt)]), prompt))
            asked[tuple(prompt)] += 1
        return self._scorer.share(
            numbered, continuations, lambda item: len(item[1]), passes_vary=True
        )

    def _load(
        self, load: str, batch_size: int | str, flags: dict[str, Any]
    ) -> tuple[Scorer, Tokenizer]:
        words = ["--load", load]
        if str(batch_size).isdigit():  # not "auto"
            words += ["--micro-batch-size", str(batch_size)]
        for name, value in flags.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        options = cli.parse(ModelOptions, words, rank=environment.rank())
        source, _, tokenizer = open_checkpoint(options)
        model, mesh = self._open.enter_context(loaded_model(options, source))
        return Scorer(model, mesh, options.micro_batch_size), tokenizer

    def _cut(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """The text of new tokens before the first stop sequence."""
        text = self._tokens.decode(ids[:-1] if {*ids[-1:]} & self._tokens.ends else ids)
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text


def run_tasks(
    options: Options, tasks: Sequence[Any], scorer: Scorer, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Runs loaded tasks; the results on the first rank, which alone prints the harness's log."""
    with quiet(on_first_rank=False):
        limits = {"num_fewshot": options.num_fewshot, "limit": options.limit}
        return _evaluate(tasks, scorer, tokenizer, **limits)


def _evaluate(
    tasks: Sequence[Any], scorer: Scorer, tokenizer: Tokenizer, **options: Any
) -> dict[str, Any]:
    """The harness's results on the first rank; empty on the others."""
    result = simple_evaluate(
        model=HarnessModel(scorer=scorer, tokenizer=tokenizer),
        tasks=list(tasks),
        # It would read all definitions otherwise.
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
        **options,
    )
    return dict(result or {})


def find_tasks(names: Sequence[str], include_path: Sequence[str]) -> TaskManager:
    """The definitions of tasks, which are not loaded yet.

    Args:
        names: Names of tasks, groups and tags.
        include_path: Folders with definitions besides the harness's own.

    Raises:
        UserError: If there is no such task.
    """
    # Reading the thousands of tasks that the harness has takes seconds.
    for include_defaults in (False, True):
        manager = TaskManager(include_path=list(include_path), include_defaults=include_defaults)
        unknown = [name for name in names if name not in manager.all_tasks]
        if not unknown:
            break
    known = manager.all_tasks
    raise_if_any(
        Problem("harness-task-unknown", task=name, hint=f"; did you mean {near}?" if near else "")
        for name in unknown
        for near in [", ".join(difflib.get_close_matches(name, known))]
    )
    return manager


def load_tasks(names: Sequence[str], include_path: Sequence[str]) -> list[Any]:
    """The tasks and groups of these names with their data, which the harness may download.

    Raises:
        UserError: If there is no such task, or one cannot be loaded.
    """
    manager = find_tasks(names, include_path)
    loaded: list[Any] = []
    for name in names:
        try:
            with quiet(on_first_rank=False):
                result = manager.load([name])
        except OSError as error:
            raise user_error("harness-data-missing", task=name, error=error) from error
        except Exception as error:  # of the task's own code, too
            raise user_error("harness-task-not-loaded", task=name, error=error) from error
        group = result["groups"].get(name)
        loaded += result["tasks"].values() if group is None else [group]
    return loaded


def run_loaded(
    tasks: Sequence[Any],
    scorer: Scorer,
    tokenizer: Tokenizer,
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, dict[str, float]]:
    """The metrics of each loaded task and group, on every rank. Collective, and silent."""
    with quiet():
        # Without standard errors, by processes of its own.
        limits = {"num_fewshot": num_fewshot, "limit": limit, "bootstrap_iters": 0}
        result = _evaluate(tasks, scorer, tokenizer, **limits)
    results = broadcast_from_rank0(result.get("results", {}))
    return {
        task: {
            # Most results are unfiltered: "acc,none".
            key.removesuffix(",none"): float(value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and "," in key and "_stderr," not in key
        }
        for task, metrics in results.items()
    }


@contextlib.contextmanager
def quiet(*, on_first_rank: bool = True) -> Iterator[None]:
    """Disables the harness's log and progress bars in the context. Other threads of the process can
    still print."""
    if environment.rank() == 0 and not on_first_rank:
        yield
        return
    modules = (task_module, model_module)
    progress = task_module.tqdm

    def without_bar(*items: Any, **options: Any) -> Any:
        return progress(*items, **{**options, "disable": True})

    disabled = logging.root.manager.disable
    had_bars = not datasets.are_progress_bars_disabled()
    logging.disable()
    datasets.disable_progress_bars()
    for module in modules:
        module.tqdm = without_bar
    try:
        yield
    finally:
        for module in modules:
            module.tqdm = progress
        logging.disable(disabled)
        if had_bars:
            datasets.enable_progress_bars()


def table(results: dict[str, Any]) -> str:
    """The results as a table."""
    return str(utils.make_table(results))


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    environment.adopt_ranks()
    environment.prepare_environment()
    with contextlib.ExitStack() as silenced:
        if environment.rank() > 0:
            null = silenced.enter_context(open(os.devnull, "w", encoding="utf-8"))
            silenced.enter_context(contextlib.redirect_stdout(null))
            silenced.enter_context(quiet())
        cli_evaluate()


if __name__ == "__main__":
    main()
