"""Reports: samples and epochs of each token file, and changes of the blend on resume.

Knows counts, but no files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ds.config.problems import Problem, counted
from megatron_ds.data.blend.blend_history import BlendHistory, BlendPhase

USAGE_FILE = "data_usage.json"
"""Name of the file that lists all token files."""
MAX_LISTED = 12
"""Most files of a split that are printed, the largest first."""
MAX_NAMED = 6
"""Most sources named in a line."""


@dataclass(frozen=True)
class FileUsage:
    """Samples that a token file contributes to a split, or to a group of it, in the entire run.

    In a run with stages: from the start of the run to the end of a stage that reads the file.

    Attributes:
        split: train, valid or test.
        prefix: Path of the pair of token files.
        weight: Its weight in the blend; the weights of a blend sum to 1.
        samples: Number of samples.
        epochs: Passes over its documents.
        group: Name of the group, if the user gave one.
        stage: Name of the stage, if the run has stages.
        excluded: Documents that are left out at the end, by --exclude-documents.
    """

    split: str
    prefix: str
    weight: float
    samples: int
    epochs: float
    group: str = ""
    stage: str = ""
    excluded: int = 0

    @property
    def label(self) -> str:
        """Stage, split and group, for messages."""
        return " ".join(filter(None, (self.stage, self.split, self.group)))

    def __str__(self) -> str:
        if not self.weight:
            return f"{self.label}: {self.prefix}, weight 0: not read"
        without = counted(self.excluded, "document")
        return (
            f"{self.label}: {self.prefix}, weight {self.weight:.6g}: "
            f"{counted(self.samples, 'sample')}, {self.epochs:.3g} epochs"
            f"{f', without {without}' if self.excluded else ''}"
        )


def summary(usage: Sequence[FileUsage], full_list: str | None) -> Iterator[str]:
    """Lines with the largest files of each split; the remaining ones are summed up.

    Args:
        usage: All files.
        full_list: Path of the file that lists all of them, if there is one.
    """
    is_limited = False
    for label, group in itertools.groupby(usage, lambda file: file.label):
        files = sorted(group, key=lambda file: -file.samples)
        is_limited = is_limited or len(files) > MAX_LISTED
        yield from map(str, files[:MAX_LISTED])
        unlisted = [file for file in files[MAX_LISTED:] if file.weight]
        unread = len(files[MAX_LISTED:]) - len(unlisted)
        if unlisted:
            epochs = [file.epochs for file in unlisted]
            files_left = counted(len(unlisted), "more file")
            samples = counted(sum(file.samples for file in unlisted), "sample")
            yield (
                f"{label}: {files_left}, total weight {sum(f.weight for f in unlisted):.6g}: "
                f"{samples}, {min(epochs):.3g} to {max(epochs):.3g} "
                "epochs"
            )
        if unread:
            yield f"{label}: {counted(unread, 'file')} of weight 0, not read"
    if is_limited:
        yield f"all files: {full_list}" if full_list else "--save lists all files"


def describe_blend(history: BlendHistory) -> str:
    """One line with the sources and weights of the training data."""
    now = history.current
    line = f"training data, {len(now.sources)} sources: {_blend(history, now)}"
    later = [phase.first_sample for phase in history.phases if phase.first_sample]
    if later:
        line += f"; changed after {join_limited([f'{first:,}' for first in later])} samples"
    return line


def describe_change(before: BlendHistory, after: BlendHistory) -> list[str]:
    """Lines on what a resumed run reads differently; empty if nothing changes."""
    lines = []
    was = before.current
    now = after.current
    if before.order != after.order:
        lines.append(f"WARNING: {Problem('blend-schedule-changed').render()}")
    is_of_other_length = before.seq_length != after.seq_length
    if is_of_other_length:
        changed = Problem("sequence-length-changed", before=before, after=after, now=now)
        lines.append(f"WARNING: {changed.render()}")
    for index, source in enumerate(before.sources):
        if source.excluded != (later := after.sources[index]).excluded:
            lines.append(f"WARNING: {Problem('documents-excluded', source=later).render()}")
    has_same_blend = (was.sources, was.weights) == (now.sources, now.weights)
    is_other = (was.first_sample, *was.weights) != (now.first_sample, *now.weights)
    if (is_other or not has_same_blend) and not (is_of_other_length and has_same_blend):
        lines += [
            f"WARNING: {Problem('blend-changed', num_samples=now.first_sample).render()}",
            f"    before: {_blend(before, was)}",
            f"    now:    {_blend(after, now)}",
            *(f"    {line}" for line in _source_changes(before, after)),
        ]
    known = {n: source.requests for n, source in enumerate(before.sources) if source.requests}
    longer = [
        n
        for n in now.sources
        if n in known
        and known[n] != after.sources[n].requests
        and before.sources[n].excluded == after.sources[n].excluded
    ]
    if longer and not is_of_other_length:
        names = join_limited([after.sources[index].identity.name for index in longer])
        lines.append(
            f" > more samples are needed than the indexes of the previous run have: {names} "
            f"{'continues' if len(longer) == 1 else 'continue'} with the remaining ones, then with "
            "newly shuffled epochs"
        )
    return lines


def _source_changes(before: BlendHistory, after: BlendHistory) -> Iterator[str]:
    old = set(before.current.sources)
    new = set(after.current.sources)
    sources = after.sources
    known = {index for index, source in enumerate(before.sources) if source.all_consumed}
    names = {source.identity.name for source in before.sources}
    name = {index: source.identity.name for index, source in enumerate(sources)}
    samples = {index: source.all_consumed for index, source in enumerate(sources)}
    changes = {
        "continued": [f"{name[n]} at its sample {samples[n]}" for n in sorted(new & known)],
        "no longer read": [f"{name[n]}, after {samples[n]} samples" for n in sorted(old - new)],
        "new": [name[n] for n in sorted(new - known)],
    }
    for change, words in changes.items():
        if words:
            yield f"{change}: {join_limited(words)}"
    repeated = sorted({name[n] for n in new if n >= len(before.sources)} & names)
    if repeated:
        named = join_limited(repeated)
        yield f"same name, but different documents: {named}: text may be repeated"


def _blend(history: BlendHistory, phase: BlendPhase) -> str:
    pairs = zip(phase.sources, phase.weights, strict=True)
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    return join_limited(
        [f"{history.sources[index].identity.name} {weight:.6g}" for index, weight in ordered]
    )


def join_limited(words: Sequence[str], limit: int = MAX_NAMED) -> str:
    """A list of the first `limit` words, and the number of further ones."""
    more = len(words) - limit
    return ", ".join(words) if more <= 0 else f"{', '.join(words[:limit])} and {more} more"
