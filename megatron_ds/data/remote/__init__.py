"""Token files by URL: a cache of their blocks on the disk of each node.

block_cache   the folder: blocks, their marks, and the limit of their size
fetcher       the process that downloads blocks into it
token_cache   opens pairs of token files, and reads tokens
"""
