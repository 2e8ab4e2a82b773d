"""Cleaning: documents of any format to JSON lines of fewer and better documents.

The path of a document: `pipeline` reads it and sends it to a worker process, where it passes the
stages (`url_filter`, `text_filters`, `deduplication`, `decontamination`; their protocol is in
`stages`). Stages that depend on earlier documents are decided in order by the one writing process,
which counts in `stats`; `report` draws the counts. `options` describes a run.
"""
