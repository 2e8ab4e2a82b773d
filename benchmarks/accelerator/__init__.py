"""Measurements on an accelerator, one module per subcommand of `benchmarks/gpu.py`.

All of them run on a CPU, too, at the size "tiny", which tests them where there is no accelerator.
"""
