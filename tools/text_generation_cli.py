#!/usr/bin/env python
"""Ask a text generation server, prompt by prompt: text_generation_cli.py HOST:PORT."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Sequence
from typing import Any

PATH = "/api"


class ServerUnreachable(Exception):
    """In words."""


def ask(address: str, prompt: str, tokens: int) -> str:
    """The prompt with its continuation. Raises NoAnswer."""
    body = json.dumps({"prompts": [prompt], "tokens_to_generate": tokens})
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("PUT", PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: Any = json.loads(response.read())
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnreachable(f"no answer from http://{address}{PATH}: {error}") from None
    except ValueError:
        raise ServerUnreachable(f"http://{address}{PATH} is no text generation server") from None
    finally:
        connection.close()
    if response.status != 200:
        message = answer.get("message", answer) if isinstance(answer, dict) else answer
        raise ServerUnreachable(f"Error {response.status}: {message}")
    try:
        return str(answer["text"][0])
    except (KeyError, IndexError, TypeError):
        raise ServerUnreachable(f"http://{address}{PATH} is no text generation server") from None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", help="of the server: 127.0.0.1:5000")
    address = parser.parse_args(argv).address.removeprefix("http://").removesuffix("/")
    try:
        http.client.HTTPConnection(address)
    except http.client.InvalidURL:
        parser.error(f"{address} is no HOST:PORT such as 127.0.0.1:5000")
    while True:
        try:
            prompt = input("Enter prompt: ")
            count = input("Enter number of tokens to generate: ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not count.strip().isdecimal():
            print(f"{count!r} is no number of tokens")
            continue
        try:
            print(f"Megatron Response:\n{ask(address, prompt, int(count))}")
        except ServerUnreachable as error:
            print(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
