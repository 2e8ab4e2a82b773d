"""Drop unwanted addresses from lists of them: blacklist_urls.py PATH OUTPUT, as in Megatron.

The command line of `megatron_ds.cleaning.url_lists`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds import cli
from megatron_ds.cleaning.url_lists import KEPT, filter_urls
from megatron_ds.cleaning.url_lists import UrlListOptions as Options


def work(options: Options) -> None:
    counts = filter_urls(options)
    kept = counts.pop(KEPT, 0)
    print(f"kept {kept:,} of {kept + counts.total():,} addresses")
    if counts:
        print("dropped " + ", ".join(f"{count:,} {why}" for why, count in counts.most_common()))
    print(f"wrote {options.output}")


main = cli.program(Options, work)

if __name__ == "__main__":
    start_tool.run(main)
