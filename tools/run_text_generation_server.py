#!/usr/bin/env python
"""Serve a trained GPT over HTTP, as Megatron's text generation server does (PUT /api).

The command line of `megatron_ds.inference.serving.server`. Runs with python, or as several
processes (torchrun, deepspeed), which share the model by tensor parallelism; the first one serves,
its peer ranks wait for its work.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import dataclasses
import importlib.util
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.inference.cli import (
    GenerationOptions,
    loaded_model,
    log_rank0,
    open_checkpoint,
    run_program,
)
from megatron_ds.inference.serving import api_schema
from megatron_ds.launch import environment, output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process.time_limits import end_process
from megatron_ds.reports.history import METRICS, Points, read_run

if TYPE_CHECKING:
    import socket

    from megatron_ds.conversion.source import SourceCheckpoint
    from megatron_ds.inference.serving.scheduler import Scheduler
    from megatron_ds.inference.serving.service import TextGenerationService
    from megatron_ds.inference.serving.template_process import TemplateProcess

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
CURVE_POINTS = 300
"""Number of points of a loss curve on the page."""


@dataclass(frozen=True)
class Options(GenerationOptions):
    """Serves a trained GPT over HTTP, as Megatron's text generation server does (PUT /api).

    docs/use/serving.md describes requests and responses. SIGTERM or Ctrl-C stops the server.

    Flags of pretrain_gpt.py are accepted, too: tokenizer flags (--tokenizer-type, --vocab-file,
    --merge-file, --tokenizer-model) override the checkpoint's, model flags must agree with the
    checkpoint, other flags have no effect.
    """

    host: str = option_field(
        "127.0.0.1",
        "address to listen on (default: 127.0.0.1, this machine only). Without --api-key-file, "
        "anyone who can reach the address can use the model",
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
    allowed_origins: tuple[str, ...] = option_field(
        (),
        "sites such as https://chat.example whose pages may send requests from browsers; * is any",
        nargs="*",
        metavar="ORIGIN",
    )
    served_model_name: tuple[str, ...] = option_field(
        (),
        "names of the model in OpenAI's API, of which responses have the first one (default: the "
        "folder's)",
        nargs="*",
        metavar="NAME",
    )
    port: int = option_field(
        5000, "port to listen on; 0 selects a free port", minimum=0, maximum=65535
    )
    inference_max_seq_length: int | None = option_field(
        None,
        "maximum length of prompt and new tokens (default: the training run's sequence "
        "length, or the number of learned positions)",
    )
    inference_max_requests: int = option_field(
        32,
        "texts that are generated at the same time; the key-value cache has a place for each",
        minimum=1,
    )
    decode_graphs: bool = option_field(
        False,
        "record the kernels of a token once for each rounded number of texts and keys, and replay "
        "them, if the device can; one process only",
    )
    max_waiting_requests: int = option_field(
        1000, "requests that may wait; further ones are answered with status 429", minimum=0
    )
    request_timeout: float = option_field(
        600.0, "seconds after which a request fails with status 504", above=0, metavar="SECONDS"
    )
    api_key_file: str | None = option_field(
        None,
        "file with a key per line, of which a request must have one (Authorization: Bearer KEY)",
        metavar="FILE",
    )
    defaults: api_schema.Defaults = option_group(api_schema.Defaults())

    def problems(self) -> Iterator[Problem]:
        needed = ("fastapi", "uvicorn", "prometheus_client")
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            yield Problem("server-packages-missing", missing=" and ".join(missing))
        yield from self.checkpoint.problems()
        if self.decode_graphs and environment.world_size() > 1:
            yield Problem("decode-graphs-need-one-process", processes=environment.world_size())
        if self.defaults.top_k and self.defaults.top_p:
            yield Problem("top-k-and-top-p")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                yield Problem("origin-invalid", "allowed_origins", origin=origin)
        if self.api_key_file is not None:
            yield from file_problems("api_key_file", self.api_key_file)


def run(options: Options) -> None:
    """Load the model and serve.

    Raises:
        UserError: If options do not fit the checkpoint or the machine.
    """
    from megatron_ds.inference.serving.server import listen

    # Before the model is loaded, so that an occupied port is reported immediately.
    listener = listen(options.host, options.port) if environment.rank() == 0 else None
    keys = read_keys(options.api_key_file)
    from megatron_ds.inference.generation.engine import GenerationEngine
    from megatron_ds.inference.generation.tp_group import (
        TpGroupBroken,
        TpLink,
        end_with_launchers,
        follow,
    )
    from megatron_ds.inference.serving.scheduler import Scheduler
    from megatron_ds.inference.serving.service import TextGenerationService, max_sequence_length

    end_with_launchers()
    source, config, tokenizer = open_checkpoint(options)
    max_length = max_sequence_length(config, options.inference_max_seq_length)
    template = None if listener is None else start_template(tokenizer.folder)
    with loaded_model(options, source) as (model, _):
        service = TextGenerationService(model, tokenizer, max_length)
        # The last token of a text is never fed to the model.
        slots = options.inference_max_requests
        engine = GenerationEngine(
            model, slots=slots, capacity=max_length - 1, use_graphs=options.decode_graphs
        )
        scheduler = Scheduler(
            engine, service.start, TpLink(), max_waiting=options.max_waiting_requests
        )
        try:
            if listener is None:
                follow()
                scheduler.run()
                return
            info = describe(source, max_length, options.defaults)
            serve(options, listener, scheduler, service, info, keys, template)
            log_rank0("the server has stopped")
            if environment.world_size() == 1:
                # At once: the interpreter's own end takes seconds on a busy machine.
                end_process(ExitCode.FINISHED)
        except TpGroupBroken as error:
            problem = Problem("server-peer-lost", error=error)
            output.print_error(output.with_rank_prefix(problem.render()))
            raise SystemExit(ExitCode.PEER_LOST) from None


def serve(
    options: Options,
    listener: socket.socket,
    scheduler: Scheduler,
    service: TextGenerationService,
    info: dict[str, Any],
    keys: Collection[str],
    template: TemplateProcess | None,
) -> None:
    """Serves on the first rank until a signal."""
    from megatron_ds.inference.serving.access import is_loopback
    from megatron_ds.inference.serving.chat_api import ChatApi
    from megatron_ds.inference.serving.completions_api import CompletionsApi
    from megatron_ds.inference.serving.interfaces import Api
    from megatron_ds.inference.serving.megatron_api import MegatronApi
    from megatron_ds.inference.serving.server import ServerOptions, TextServer

    host, port = listener.getsockname()[:2]
    is_public = not is_loopback(host)
    if is_public and not keys:
        log_rank0(f"WARNING: {Problem('host-is-public', host=options.host).render()}")
    shown = f"[{host}]" if ":" in host else host
    log_rank0(
        f"serving on http://{shown}:{port}/ (a page; PUT /api; OpenAI's API at /v1), "
        f"{service.max_length} tokens per text"
    )
    checks_hosts = not is_public or options.allowed_hosts
    names = (options.host, *options.allowed_hosts) if checks_hosts else None
    model_names = options.served_model_name or (info["name"],)
    completions = CompletionsApi(service, options.defaults, model_names, info.pop("saved"))
    apis: dict[str, Api] = {
        "/api": MegatronApi(service, options.defaults),
        "/v1/completions": completions,
        "/v1/chat/completions": ChatApi(completions, template),
    }
    models = completions.models()
    documents = {"/info": info | {"name": model_names[0]}, "/v1/models": models}
    documents |= {f"/v1/models/{entry['id']}": entry for entry in models["data"]}
    server_options = ServerOptions(names, options.allowed_origins, keys, options.request_timeout)
    TextServer(scheduler, apis, log_rank0, server_options, documents).run(listener)


def start_template(folder: Path | None) -> TemplateProcess | None:
    """The chat template of a tokenizer's folder, if it has one; warns if it renders nothing.

    Raises:
        UserError: If rendering a conversation takes too much time or memory.
    """
    from megatron_ds.inference.serving.template_process import TemplateProcess
    from megatron_ds.tokenizer.chat_template import read_chat_template

    template = read_chat_template(folder)
    if template is None:
        return None
    process = TemplateProcess(template)
    if (error := process.warning()) is not None:
        for problem in error.problems:
            log_rank0(f"WARNING: {problem.render()}")
    return process


def read_keys(file: str | None) -> list[str]:
    """The keys of a file, one per line.

    Raises:
        UserError: If it has none.
    """
    if file is None:
        return []
    lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    if not (keys := [line.strip() for line in lines if line.strip()]):
        raise user_error("api-key-file-empty", "api_key_file", file=file)
    return keys


def describe(
    source: SourceCheckpoint, max_length: int, defaults: api_schema.Defaults
) -> dict[str, Any]:
    """Returns the model's facts for the browser page, and its initial settings."""
    from megatron_ds.model.spec.architecture import model_spec

    folder, model, moe = source.path.resolve(), source.settings.model, source.settings.moe
    prefix, _, step = folder.name.partition("global_step")
    is_step = not prefix and step.isdecimal()
    return {
        "saved": int(folder.stat().st_mtime),
        "name": folder.parent.name if is_step else folder.name,
        "checkpoint": f"step {step}" if is_step else source.format,
        "parameters": model_spec(model, moe).elements(),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "num_experts": max(moe.num_experts),
        "max_length": max_length,
        "defaults": dataclasses.asdict(defaults),
        "loss": loss_of_run(folder.parent, int(step)) if is_step else None,
    }


def loss_of_run(folder: Path, until: int) -> dict[str, Points] | None:
    """The curves of a --save folder as far as an iteration, if it has readable ones; validation
    uses the first dataset."""
    if not (folder / METRICS).is_file():
        return None
    try:
        run = read_run(folder, until)
    except (UserError, OSError) as error:
        log_rank0(f"WARNING: the page shows no loss curve: {error}")
        return None
    first_group = next(iter(run.groups("validation")), None)
    train = thinned(run.points())
    validation = thinned(run.losses("validation", first_group))
    return {"train": train, "validation": validation} if train else None


def thinned(points: Points) -> Points:
    """At most `CURVE_POINTS`: means of as many consecutive losses, each at the last iteration.

    Losses that are not finite, which JSON cannot express, are left out.
    """
    points = [(iteration, loss) for iteration, loss in points if math.isfinite(loss)]
    size = math.ceil(len(points) / CURVE_POINTS) or 1
    groups = [points[max(0, end - size) : end] for end in range(len(points), 0, -size)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in reversed(groups)]


if __name__ == "__main__":
    start_tool.run(partial(run_program, Options, run))
