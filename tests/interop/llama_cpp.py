"""Runs llama.cpp's runtime on one GGUF file, in a process of its own: `llama_cpp.py JOB.json`.

The job has the file (`model`), token ids (`ids`), texts and whether names of special tokens in them
count (`texts`, `special`), and the result (`out`): logits [tokens, vocabulary] in fp32 and the ids
of the texts. The runtime is the shared library of xllamacpp, whose functions are llama.h's.
Settings are changed at their offsets, after the defaults there have been compared.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS_BYTES = 512
"""At least the size of a struct of settings, which is passed by value."""
FLASH_ATTENTION = 52
CACHE_TYPES = 104
"""Offsets in llama_context_params: of the flash attention setting, -1 by default, and of the types
of keys and values in the cache, two times fp16 by default."""
TOKENS_AT_ONCE = 512


class Settings(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * SETTINGS_BYTES),)


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class Runtime:
    """A model in llama.cpp."""

    def __init__(self, model: str) -> None:
        (library,) = Path(importlib.import_module("xllamacpp").__path__[0]).glob("*.so")
        self._library = ctypes.CDLL(str(library))
        self._messages: list[str] = []
        self._log = LOG(
            lambda level, text, data: self._messages.append(text.decode(errors="replace"))
        )
        self._call("llama_log_set", None, LOG, ctypes.c_void_p)(self._log, None)
        self._call("llama_backend_init", None)()
        settings = self._call("llama_model_default_params", Settings)()
        load = self._call("llama_model_load_from_file", ctypes.c_void_p, ctypes.c_char_p, Settings)
        self._model = load(model.encode(), settings)
        if not self._model:
            raise SystemExit("".join(self._messages)[-2000:])
        get_vocab = self._call("llama_model_get_vocab", ctypes.c_void_p, ctypes.c_void_p)
        self._vocab = get_vocab(self._model)

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        function.argtypes = [*arguments]
        return function

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text, with what the file puts around it."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 16))()
        integer = ctypes.c_int32
        tokenize = self._call(
            "llama_tokenize", integer, ctypes.c_void_p, ctypes.c_char_p, integer,
            ctypes.POINTER(integer), integer, ctypes.c_bool, ctypes.c_bool,
        )  # fmt: skip
        count = tokenize(self._vocab, data, len(data), ids, len(ids), True, special)
        return [*ids[: max(count, 0)]]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, token by token: llama_detokenize removes blanks before punctuation."""
        integer = ctypes.c_int32
        piece = self._call(
            "llama_token_to_piece", integer, ctypes.c_void_p, integer, ctypes.c_char_p, integer,
            integer, ctypes.c_bool,
        )  # fmt: skip
        data = b""
        for token in ids:
            buffer = ctypes.create_string_buffer(256)
            count = piece(self._vocab, token, buffer, len(buffer), 0, True)
            data += buffer.raw[: max(count, 0)]
        return data.decode(errors="replace")

    def logits(self, ids: list[int]) -> Any:
        """fp32 logits [tokens, vocabulary], with a cache in fp32."""
        raw = bytearray(self._call("llama_context_default_params", Settings)().bytes)
        if struct.unpack_from("<i", raw, FLASH_ATTENTION) != (-1,):
            raise SystemExit("the settings of the runtime are in another order")
        if struct.unpack_from("<ii", raw, CACHE_TYPES) != (1, 1):
            raise SystemExit("the settings of the runtime are in another order")
        struct.pack_into("<III", raw, 0, TOKENS_AT_ONCE, TOKENS_AT_ONCE, TOKENS_AT_ONCE)
        struct.pack_into("<i", raw, FLASH_ATTENTION, 0)
        struct.pack_into("<ii", raw, CACHE_TYPES, 0, 0)
        settings = Settings((ctypes.c_ubyte * SETTINGS_BYTES)(*raw))
        start = self._call("llama_init_from_model", ctypes.c_void_p, ctypes.c_void_p, Settings)
        context = start(self._model, settings)
        integer = ctypes.c_int32
        batch = self._call("llama_batch_init", Batch, integer, integer, integer)(len(ids), 0, 1)
        for at, token in enumerate(ids):
            batch.token[at] = token
            batch.pos[at] = at
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = 0
            batch.logits[at] = 1
        batch.n_tokens = len(ids)
        status = self._call("llama_decode", integer, ctypes.c_void_p, Batch)(context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode: {status}")
        rows = self._call("llama_vocab_n_tokens", integer, ctypes.c_void_p)(self._vocab)
        get_row = self._call(
            "llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, integer
        )
        values = [get_row(context, at) for at in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(value, (rows,)).copy() for value in values])


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    runtime = Runtime(job["model"])
    ids = [runtime.encode(text, special=job["special"]) for text in job["texts"]]
    logits = runtime.logits(job["ids"]) if job["ids"] else np.zeros((0, 0), np.float32)
    np.savez(job["out"], ids=np.array(json.dumps(ids)), logits=logits)


if __name__ == "__main__":
    main()
