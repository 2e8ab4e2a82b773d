"""Serve a trained GPT over HTTP, as Megatron's text generation server does (PUT /api).

Runs with python, or as several processes (torchrun, deepspeed), which share the model by tensor
parallelism; the first one serves, its peer ranks wait for its work.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.inference.cli import loaded_model, log_rank0, open_checkpoint, run_program
from megatron_ds.launch import environment, output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process.time_limits import end_process
from megatron_ds.server.model_facts import describe
from megatron_ds.server.options import Options

if TYPE_CHECKING:
    import socket

    from megatron_ds.inference.serving.scheduler import Scheduler
    from megatron_ds.inference.serving.service import TextGenerationService
    from megatron_ds.inference.serving.template_process import TemplateProcess


def run(options: Options) -> None:
    """Load the model and serve.

    Raises:
        UserError: If options do not fit the checkpoint or the machine.
    """
    from megatron_ds.inference.serving.server import listen

    # Before the model is loaded, so that an occupied port is reported immediately.
    listener = listen(options.host, options.port) if environment.rank() == 0 else None
    keys = read_keys(options.api_key_file)
    from megatron_ds.inference.generation.direct_calls import call_directly
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
        call_directly(model)
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
    facts = {"name": model_names[0], "chat": template is not None}
    documents = {"/info": info | facts, "/v1/models": models}
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


main = partial(run_program, Options, run)
