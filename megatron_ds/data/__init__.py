"""Documents to tokens on disk, tokens to samples, samples to micro-batches.

Knows no process groups: ranks come in as integers. Only `stream.py` imports torch, so that
preprocessing starts quickly.
"""
