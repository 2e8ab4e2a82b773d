"""Query a text generation server interactively: text_generation_cli.py HOST:PORT."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, user_error

PATH = "/api"
STATE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Options:
    """Queries a text generation server interactively."""

    PROGRAM: ClassVar[str] = "text_generation_cli.py"

    address: str = option_field("", metavar="HOST:PORT", positional=True, required=True)
    """Address of the server, such as 127.0.0.1:5000."""

    @property
    def host_and_port(self) -> str:
        return self.address.removeprefix("http://").partition("/")[0]

    def problems(self) -> Iterator[Problem]:
        if self.address and not re.search(r":\d+$", self.host_and_port):
            yield Problem("invalid-server-address", address=self.address)


def check_responds(address: str) -> None:
    """Asks for the server's state, which Megatron's server does not have: any status will do.

    Raises:
        UserError: If the server does not respond.
    """
    connection = http.client.HTTPConnection(address, timeout=STATE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        raise user_error("server-not-responding", address=address, error=error) from None
    finally:
        connection.close()


def ask(address: str, prompt: str, tokens: int) -> str:
    """The prompt with its continuation, or the server's error.

    Raises:
        UserError: If the server does not respond.
    """
    request = {"prompts": [prompt], "tokens_to_generate": tokens}
    body = json.dumps(request if prompt else {**request, "add_BOS": True})
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("PUT", PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: Any = json.loads(response.read())
        if response.status == 200:
            return f"Megatron Response:\n{answer['text'][0]}"
    except (OSError, http.client.HTTPException) as error:
        raise user_error("server-not-responding", address=address, error=error) from None
    except (ValueError, LookupError, TypeError):
        return f"http://{address}{PATH} is not a text generation server"
    finally:
        connection.close()
    message = answer.get("message", answer) if isinstance(answer, dict) else answer
    return f"Error {response.status}: {message}"


def work(options: Options) -> None:
    check_responds(options.host_and_port)  # before a prompt is typed
    while True:
        try:
            prompt = input("Enter prompt: ")
            count = input("Enter number of tokens to generate: ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not count.strip().isdecimal():
            print(f"{count!r} is not a number of tokens")
            continue
        print(ask(options.host_and_port, prompt, int(count)))


main = cli.program(Options, work)
