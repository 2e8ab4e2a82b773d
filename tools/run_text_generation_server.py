#!/usr/bin/env python
"""Serve a trained GPT over HTTP, as Megatron's text generation server does (PUT /api)."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.server.command import main

if __name__ == "__main__":
    start_tool.run(main)
