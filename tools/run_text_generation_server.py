#!/usr/bin/env python
"""Serve a trained GPT over HTTP, as Megatron's text generation server does (PUT /api).

The command line of `megatron_ds.inference.server`. Runs with python, or as several processes
(torchrun, deepspeed), which share the model by tensor parallelism; the first one serves, the others
wait for its work.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

import dataclasses
import importlib.util
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem, counted
from megatron_ds.inference import api_schema
from megatron_ds.inference.cli import (
    GenerationOptions,
    loaded_model,
    log_rank0,
    open_checkpoint,
    run_program,
)
from megatron_ds.launch import environment, output
from megatron_ds.launch.exit_codes import ExitCode

if TYPE_CHECKING:
    from megatron_ds.conversion.source import SourceCheckpoint
    from megatron_ds.inference.service import GenerationJob, GenerationResult, TextGenerationService
    from megatron_ds.inference.tp_group import TpWorkerGroup


@dataclass(frozen=True)
class Options(GenerationOptions):
    """Serves a trained GPT over HTTP, as Megatron's text generation server does (PUT /api).

    docs/serving.md describes requests and responses. SIGTERM or Ctrl-C stops the server.

    Flags of pretrain_gpt.py are accepted, too: those of the tokenizer (--tokenizer-type,
    --vocab-file, --merge-file, --tokenizer-model) override the checkpoint's, those of the model
    must agree with the checkpoint, the others have no effect.
    """

    host: str = option_field(
        "127.0.0.1",
        "address to listen on (default: 127.0.0.1, this machine only). There is no "
        "authentication: anyone who can reach the address can use the model",
        metavar="HOST",
    )
    allowed_hosts: tuple[str, ...] = option_field(
        (),
        "host names of requests besides those of this machine, such as that of a proxy. Requests "
        "for other hosts and of web pages of other sites are rejected (default: none if the "
        "server is for this machine only, otherwise all)",
        nargs="*",
        metavar="HOST",
    )
    port: int = option_field(
        5000, "port to listen on; 0 selects a free port", minimum=0, maximum=65535
    )
    inference_max_seq_length: int | None = option_field(
        None,
        "maximum length of prompt and new tokens (default: the training run's sequence "
        "length, or the number of learned positions)",
    )
    micro_batch_size: int = option_field(
        8, "prompts of a request per batch; does not affect the output", minimum=1
    )
    defaults: api_schema.Defaults = option_group(api_schema.Defaults())

    def problems(self) -> Iterator[Problem]:
        needed = ("fastapi", "uvicorn")
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            yield Problem("server-packages-missing", missing=" and ".join(missing))
        yield from self.checkpoint.problems()
        if self.defaults.top_k and self.defaults.top_p:
            yield Problem("top-k-and-top-p")


def run(options: Options) -> None:
    """Load the model and serve.

    Raises:
        UserError: If options do not fit the checkpoint or the machine.
    """
    from megatron_ds.inference.server import TextServer, is_loopback, listen

    # Before the model is loaded, so that an occupied port is reported immediately.
    listener = listen(options.host, options.port) if environment.rank() == 0 else None
    from megatron_ds.inference.service import TextGenerationService, max_sequence_length
    from megatron_ds.inference.tp_group import TpGroupBroken, TpWorkerGroup, end_with_launchers

    end_with_launchers()
    source, config, tokenizer = open_checkpoint(options)
    max_length = max_sequence_length(config, options.inference_max_seq_length)
    with loaded_model(options, source) as (model, _):
        service = TextGenerationService(
            model,
            tokenizer,
            max_length=max_length,
            default_new_tokens=options.defaults.tokens_to_generate,
            micro_batch_size=options.micro_batch_size,
        )
        workers = TpWorkerGroup(service.run)
        try:
            if listener is None:
                workers.run_as_follower()
                return
            runner = ServerRunner(service, workers, options.defaults)
            host, port = listener.getsockname()[:2]
            is_public = not is_loopback(host)
            if is_public:
                log_rank0(f"WARNING: {Problem('host-is-public', host=options.host).render()}")
            shown = f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{port}/"
            log_rank0(f"serving on {address} (a page; PUT /api), {max_length} tokens per text")
            checks_hosts = not is_public or options.allowed_hosts
            names = (options.host, *options.allowed_hosts) if checks_hosts else None
            info = describe(source, max_length, options.defaults)
            TextServer(runner.read, runner.perform, log_rank0, names, info).run(listener)
            workers.shutdown_followers()
            log_rank0("the server has stopped")
        except TpGroupBroken as error:
            problem = Problem("server-peer-lost", error=error)
            output.print_error(output.with_rank_prefix(problem.render()))
            raise SystemExit(ExitCode.PEER_LOST) from None


def describe(
    source: SourceCheckpoint, max_length: int, defaults: api_schema.Defaults
) -> dict[str, Any]:
    """What the page for browsers shows of the model, and its first settings."""
    from megatron_ds.model.flops import parameters_per_rank

    folder = source.path.resolve()
    is_step = folder.name.startswith("global_step")
    return {
        "name": folder.parent.name if is_step else folder.name,
        "checkpoint": folder.name.replace("global_step", "step ") if is_step else source.format,
        "parameters": parameters_per_rank(source.settings.model, 1, source.settings.moe),
        "max_length": max_length,
        "defaults": dataclasses.asdict(defaults),
    }


@dataclass(frozen=True)
class ServerRunner:
    """Answers requests, on the first rank."""

    service: TextGenerationService
    workers: TpWorkerGroup[GenerationJob, GenerationResult]
    defaults: api_schema.Defaults

    def read(self, body: bytes) -> GenerationJob:
        return self.service.build_job(api_schema.read(body, self.defaults))

    def perform(self, job: GenerationJob, cancelled: threading.Event) -> dict[str, Any]:
        start = time.monotonic()
        outcome = self.workers.run_as_leader(job, cancelled)
        if not job.request.no_log:
            given, all_tokens = (sum(map(len, each)) for each in (job.prompts, outcome.texts))
            seconds = time.monotonic() - start
            log_rank0(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} prompts: {len(job.prompts)} of "
                f"{counted(given, 'token')}, texts: {len(outcome.texts)} of "
                f"{counted(all_tokens, 'token')}, {seconds:.2f} s"
            )
        return self.service.build_response(job, outcome)


if __name__ == "__main__":
    run_program(Options, run, sys.argv[1:])
