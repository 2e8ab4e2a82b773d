"""Merge token files (.bin and .idx) into one pair, as if all text had been preprocessed at once.

The command line over `megatron_ds.data.merge`: a folder of pairs, or prefixes in an order of one's
own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from megatron_ds.data.merge import MergeProgress, merge, prefixes_in
from megatron_ds.launch import output


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--input", metavar="DIR", help="merge every pair of a folder, by name")
    inputs.add_argument(
        "--datasets",
        nargs="+",
        metavar="PREFIX",
        help="merge these, in this order (paths without .bin and .idx)",
    )
    parser.add_argument(
        "--output-prefix",
        "--output_prefix",
        required=True,
        metavar="PREFIX",
        help="path of the new pair without .bin and .idx",
    )
    elsewhere = parser.add_argument_group("taken from other Megatrons, without effect")
    elsewhere.add_argument("--merge", choices=["serial", "distributed"], help="always serial")
    elsewhere.add_argument("--torch-backend", "--torch_backend", choices=["gloo", "mpi"])
    elsewhere.add_argument("--local-rank", "--local_rank", type=int)
    parser.add_argument("--multimodal", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.multimodal:
        parser.error("--multimodal: the modes of multimodal files are not read")
    if args.merge == "distributed":
        print("WARNING: --merge distributed: one process copies all", file=sys.stderr)
    for flag in ("torch_backend", "local_rank"):
        if getattr(args, flag) is not None:
            print(f"WARNING: --{flag.replace('_', '-')}: has no effect", file=sys.stderr)
    return args


def _show(merged: MergeProgress) -> None:
    share = merged.copied_bytes / merged.total_bytes if merged.total_bytes else 1.0
    print(f"{merged.datasets} merged, {share:.0%} of the bytes", file=sys.stderr, flush=True)


@output.plain_warnings()
def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    start = time.perf_counter()
    try:
        prefixes = args.datasets or prefixes_in(args.input)
        done = merge(prefixes, args.output_prefix, _show)
    except (ValueError, OSError) as error:
        print(f"merge_datasets.py: error:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    seconds = max(time.perf_counter() - start, 1e-9)
    with output.ignore_broken_pipe():
        print(
            f"{done.datasets} datasets: {done.documents} documents, {done.sequences} sequences, "
            f"{done.tokens} tokens ({done.copied_bytes / seconds / 1e6:.1f} MB/s)"
        )
        print(f"wrote {args.output_prefix}.bin and .idx")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
