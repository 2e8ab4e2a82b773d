#!/usr/bin/env python
"""Serve a trained GPT over HTTP, as Megatron's text generation server does (PUT /api).

The command line over `megatron_ds.inference.server`. Runs with python, and on several processes
(torchrun, deepspeed), which then share the model by tensor parallelism; the first serves, the
others wait for its work.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds.inference import cli
from megatron_ds.inference.api_schema import Defaults
from megatron_ds.inference.cli import (
    TrainingFlags,
    add_flag,
    add_model_flags,
    add_sampling_flags,
    broadcast_from_rank0,
    fail,
    requested_dtype,
    say,
)
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.launch import distributed, environment, output
from megatron_ds.launch.exit_codes import ExitCode

if TYPE_CHECKING:
    from megatron_ds.inference.service import GenerationJob, GenerationResult, TextGenerationService
    from megatron_ds.inference.tp_group import TpWorkerGroup

NAME = Path(__file__).name
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EPILOG = """
Also read are pretrain_gpt.py's flags of the tokenizer (--tokenizer-type, --vocab-file,
--merge-file, --tokenizer-model), which then stand in for those of the training, and of the model,
which must agree with the checkpoint. Its other flags have no effect.
docs/serving.md describes requests and answers. SIGTERM or Ctrl-C ends the server.
"""


@dataclass(frozen=True)
class Settings:
    """A checked command line."""

    args: argparse.Namespace
    defaults: Defaults
    training: TrainingFlags

    @property
    def precision(self) -> str | None:
        return requested_dtype(self.args)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME, description=__doc__, epilog=EPILOG, allow_abbrev=False, exit_on_error=False
    )

    server = parser.add_argument_group("server")
    add_flag(
        server,
        "host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine alone; there is no "
        "password: whoever reaches another address may use the model)",
    )
    add_flag(server, "port", type=int, default=5000, metavar="N", help="default: %(default)s")
    model = parser.add_argument_group("model")
    add_model_flags(model)
    add_flag(
        model,
        "inference-max-seq-length",
        type=int,
        metavar="N",
        help="tokens of a text at most, prompt included (default: the training's sequence length, "
        "or as many as there are learned positions)",
    )
    add_flag(
        model,
        "micro-batch-size",
        type=int,
        default=8,
        metavar="N",
        help="prompts of a request that are continued together (default: %(default)s); the text "
        "does not depend on it",
    )
    default = Defaults()
    requests = parser.add_argument_group("where a request does not say it")
    add_flag(
        requests,
        "out-seq-length",
        "tokens-to-generate",
        type=int,
        default=default.tokens_to_generate,
        metavar="N",
        help="new tokens per prompt, as far as there is room (default: %(default)s)",
    )
    add_sampling_flags(requests, default)
    return parser


def parse(argv: Sequence[str]) -> tuple[Settings | None, list[str]]:
    """The command line and every problem that can be seen without the checkpoint."""
    parser = build_parser()
    try:
        args, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        return None, [str(error)]
    training, problems = cli.read(rest, vars(args))
    sampling = SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    problems += [*sampling.problems(), *_problems(args)]
    defaults = Defaults(args.out_seq_length, args.temperature, args.top_k, args.top_p)
    return Settings(args, defaults, training), problems


def _problems(args: argparse.Namespace) -> Iterator[str]:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{' and '.join(missing)} not installed: pip install fastapi uvicorn"
    yield from cli.model_problems(args)
    if args.top_k and args.top_p:
        yield "--top-k and --top-p exclude each other"
    if not 0 <= args.port < 2**16:
        yield f"--port {args.port}: must lie between 0 (any that is free) and 65535"
    for flag, value in (
        ("--out-seq-length", args.out_seq_length),
        ("--micro-batch-size", args.micro_batch_size),
    ):
        if value < 1:
            yield f"{flag} {value}: must be positive"


def run(settings: Settings) -> None:
    """Loads and serves. Raises ValueError for what does not fit the checkpoint or the machine."""
    from megatron_ds.inference import load_checkpoint
    from megatron_ds.inference.server import TextServer, listen
    from megatron_ds.inference.service import (
        GenerationJob,
        GenerationResult,
        TextGenerationService,
        max_sequence_length,
    )
    from megatron_ds.inference.tp_group import TpGroupBroken, TpWorkerGroup, end_with_launchers
    from megatron_ds.parallel.mesh import Mesh

    end_with_launchers()
    args = settings.args
    found = load_checkpoint.find_checkpoint(Path(args.load), say)
    config = load_checkpoint.model_config(found)
    tokenizer = cli.tokenizer_for(settings.training, found, NAME)
    max_length = max_sequence_length(config, args.inference_max_seq_length)
    # Before the model: a port that is taken need not wait for it.
    listener = listen(args.host, args.port) if environment.rank() == 0 else None
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints which ops it loads
        here = distributed.init_distributed(settings.training.runtime_config(endless=False))
    try:
        mesh = Mesh.build(here.world_size)
        # A training may save while we start: all ranks take what the first one found.
        found = broadcast_from_rank0(found)
        say(f"loading the checkpoint {found.path}")
        answerer = TextGenerationService(
            load_checkpoint.load_model(found, mesh, here.device, precision=settings.precision),
            tokenizer,
            max_length=max_length,
            usual_new_tokens=settings.defaults.tokens_to_generate,
            micro_batch_size=args.micro_batch_size,
        )
        crew = TpWorkerGroup[GenerationJob, GenerationResult](answerer.run)
        if listener is None:
            crew.run_as_follower()
            return
        service = ServerRunner(answerer, crew, settings.defaults)
        host, port = listener.getsockname()[:2]
        if args.host not in LOOPBACK:
            say(f"WARNING: --host {args.host}: whoever reaches this address may use the model")
        shown = f"[{host}]" if ":" in host else host
        say(f"serving on http://{shown}:{port} (PUT /api), {max_length} tokens per text")
        TextServer(service.read, service.perform, say).run(listener)
        crew.shutdown_followers()
        say("the server has ended")
    except TpGroupBroken as error:
        output.print_error(output.with_rank_prefix(f"ends: {error}"))
        raise SystemExit(ExitCode.PEER_LOST) from None
    finally:
        distributed.destroy_process_group()


class ServerRunner:
    """Requests to answers, on the first rank."""

    def __init__(
        self,
        answerer: TextGenerationService,
        crew: TpWorkerGroup[GenerationJob, GenerationResult],
        defaults: Defaults,
    ) -> None:
        self._answerer = answerer
        self._crew = crew
        self._defaults = defaults

    def read(self, body: bytes) -> GenerationJob:
        from megatron_ds.inference import api_schema

        return self._answerer.job(api_schema.read(body, self._defaults))

    def perform(self, job: GenerationJob, cancelled: threading.Event) -> dict[str, Any]:
        start = time.monotonic()
        outcome = self._crew.run_as_leader(job, cancelled)
        if not job.query.no_log:
            given, all_tokens = (sum(map(len, each)) for each in (job.prompts, outcome.texts))
            seconds = time.monotonic() - start
            say(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} prompts: {len(job.prompts)} of {given} "
                f"tokens, texts: {len(outcome.texts)} of {all_tokens} tokens, {seconds:.2f} s"
            )
        return self._answerer.answer(job, outcome)


def main(argv: Sequence[str]) -> None:
    settings, problems = parse(argv)
    if problems or settings is None:
        fail(NAME, problems)
    environment.prepare_environment()
    with output.exit_on_user_error():
        run(settings)


if __name__ == "__main__":
    main(sys.argv[1:])
