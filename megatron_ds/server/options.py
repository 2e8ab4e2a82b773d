"""Options of tools/run_text_generation_server.py."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem
from megatron_ds.inference.cli import GenerationOptions
from megatron_ds.inference.serving import api_schema
from megatron_ds.launch import environment

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")


@dataclass(frozen=True)
class Options(GenerationOptions):
    """Serves a trained GPT over HTTP, as Megatron's text generation server does (PUT /api).

    docs/use/serving.md describes requests and responses. SIGTERM or Ctrl-C stops the server.

    Flags of pretrain_gpt.py are accepted, too: tokenizer flags (--tokenizer-type, --vocab-file,
    --merge-file, --tokenizer-model) override the checkpoint's, model flags must agree with the
    checkpoint, other flags have no effect.
    """

    PROGRAM: ClassVar[str] = "run_text_generation_server.py"

    host: str = option_field("127.0.0.1", metavar="HOST")
    """Address to listen on (default: 127.0.0.1, this machine only). Without --api-key-file, anyone
    who can reach the address can use the model."""
    allowed_hosts: tuple[str, ...] = option_field((), nargs="*", metavar="HOST")
    """Host names of requests besides those of this machine, such as that of a proxy. Requests for
    other hosts and of web pages of other sites are rejected (default: none if the server is for
    this machine only, otherwise all)."""
    allowed_origins: tuple[str, ...] = option_field((), nargs="*", metavar="ORIGIN")
    """Sites such as https://chat.example whose pages may send requests from browsers; * is any."""
    served_model_name: tuple[str, ...] = option_field((), nargs="*", metavar="NAME")
    """Names of the model in OpenAI's API, of which responses have the first one (default: the
    folder's)."""
    port: int = option_field(5000, minimum=0, maximum=65535)
    """Port to listen on; 0 selects a free port."""
    inference_max_seq_length: int | None = option_field(
        None,
    )
    """Maximum length of prompt and new tokens (default: the training run's sequence length, or the
    number of learned positions)."""
    inference_max_requests: int = option_field(32, minimum=1)
    """Texts that are generated at the same time; the key-value cache has a place for each."""
    decode_graphs: bool = option_field(
        False,
    )
    """Record the kernels of a token once for each rounded number of texts and keys, and replay
    them, if the device can; one process only."""
    max_waiting_requests: int = option_field(1000, minimum=0)
    """Requests that may wait; further ones are answered with status 429."""
    request_timeout: float = option_field(600.0, above=0, metavar="SECONDS")
    """Seconds after which a request fails with status 504."""
    api_key_file: str | None = option_field(None, metavar="FILE")
    """File with a key per line, of which a request must have one (Authorization: Bearer KEY)."""
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
