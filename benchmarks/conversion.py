"""Time and memory of conversions to hf and gguf, relative to llama.cpp's converter and `cp`.

    python benchmarks/conversion.py --converter llama.cpp/convert_hf_to_gguf.py --output result.json

A Llama of 1.1 billion parameters with random weights in bf16 is converted from a folder of weights
by the command line. Every round runs, one after another and each in a process of its own: --to
gguf, `cp` of its file followed by fsync, --to gguf in q8_0, --to hf, and llama.cpp's converter on
that folder, without fsync. The inputs are dropped from memory before. llama.cpp's converter is not
part of this repository; it runs with `--converter-python`, and is given the name of the tokenizer's
regular expression, because it refuses vocabularies that it does not know. Without --converter its
rows are left out; with --gguf-only all but the first two are. Peak memory is that of the process
without mapped files. Needs 12 GB of disk; --small takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json

REPOSITORY = Path(__file__).resolve().parents[1]
TO_GGUF = "to gguf"
TO_Q8 = "to gguf, q8_0"
TO_HF = "to hf"
CONVERTER = "llama.cpp's converter"
BOTH = f"{TO_HF}, then {CONVERTER}"
COPY = "cp and fsync"
RATIOS = ((TO_GGUF, BOTH, 0.5), (TO_GGUF, COPY, 1.5), (TO_HF, COPY, None))
"""Pairs of times, and the largest ratio that is aimed at."""
MEMORY = 400e6
"""Bytes that a conversion may have beyond two tensors, the program itself among them."""
OURS = (TO_GGUF, TO_Q8, TO_HF)
"""Conversions of this program."""
ELEMENT_BYTES = 2
"""Bytes of an element of the tensors, in bf16."""
OUTPUTS = {
    TO_GGUF: "model.gguf",
    COPY: "copy.gguf",
    TO_Q8: "q8_0.gguf",
    TO_HF: "hf",
    CONVERTER: "theirs.gguf",
}
"""Files and folders that the jobs write."""
NAMED = """\
import runpy, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the converter with the name of the tokenizer's regular expression."""


@dataclass(frozen=True)
class Shape:
    """A Llama of the benchmark."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int


MODEL = Shape(layers=22, hidden=2048, heads=32, groups=4, ffn=5632, vocab=32000)
SMALL = Shape(layers=2, hidden=64, heads=4, groups=2, ffn=96, vocab=300)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--converter", type=Path, help="convert_hf_to_gguf.py of llama.cpp")
    parser.add_argument(
        "--gguf-only", action="store_true", help="--to gguf and cp alone, some seconds a round"
    )
    parser.add_argument(
        "--converter-python", default=sys.executable, help="interpreter of --converter"
    )
    parser.add_argument("--folder", type=Path, help="folder of the disk to measure")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    options = parser.parse_args(argv)
    machine = this_machine()
    converter: list[str] = []
    if options.converter is not None:
        converter = [options.converter_python, "-c", NAMED, str(options.converter.resolve())]
    shape = SMALL if options.small else MODEL
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        jobs = (TO_GGUF, COPY) if options.gguf_only else tuple(OUTPUTS)
        result = measure(shape, Path(folder), options.rounds, converter, jobs)
    print(f"{machine.cpu}, {machine.cores} cores, load {machine.load}", report(result), sep="\n")
    if options.output is not None:
        packages = versions(["torch", "gguf", "safetensors", "transformers"])
        write_json(options.output, {"machine": asdict(machine), "versions": packages, **result})
    return 0


def measure(
    shape: Shape,
    folder: Path,
    rounds: int,
    converter: Sequence[str],
    jobs: Collection[str] = tuple(OUTPUTS),
) -> dict[str, Any]:
    """Runs all rounds.

    Args:
        shape: The model.
        folder: Folder for all files.
        rounds: Number of rounds.
        converter: Command of llama.cpp's converter; empty: it is left out.
        jobs: Names of the jobs of a round.

    Returns:
        Sizes, seconds, CPU seconds and peak memory of each job by round, and ratios.
    """
    weights = folder / "weights"
    write_model(shape, folder, weights)
    seconds: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    sizes = {"weights": _size(weights)}
    for _ in range(rounds):
        for name, command, output in _jobs(folder, weights, converter):
            if name not in jobs:
                continue
            _remove(output)
            took, cpu, peak = run(command, output if name == COPY else None)
            seconds.setdefault(name, []).append(took)
            cpus.setdefault(name, []).append(cpu)
            if name in OURS:
                peaks.setdefault(name, []).append(peak)
            sizes[name] = _size(output)
            _drop(output)
            _drop(weights)
        for name in (TO_Q8, COPY, CONVERTER):
            _remove(folder / OUTPUTS[name])
    if {TO_HF, CONVERTER} <= seconds.keys():
        pairs = zip(seconds[TO_HF], seconds[CONVERTER], strict=True)
        seconds[BOTH] = [one + other for one, other in pairs]
    largest = shape.vocab * shape.hidden
    return {
        "parameters": sizes["weights"] / 2,
        "bytes": sizes,
        "seconds": seconds,
        "cpu_seconds": cpus,
        "ratios": ratios(seconds),
        "peak_bytes": {name: max(values) for name, values in peaks.items()},
        "limit_bytes": dict.fromkeys(peaks, 2 * largest * ELEMENT_BYTES + MEMORY),
    }


def _jobs(
    folder: Path, weights: Path, converter: Sequence[str]
) -> list[tuple[str, list[str], Path]]:
    """Name, command and output of each job of a round."""
    outputs = {name: folder / output for name, output in OUTPUTS.items()}

    def ours(name: str, *flags: str) -> list[str]:
        program = str(REPOSITORY / "tools" / "convert_checkpoint.py")
        command = [sys.executable, program, "--load", str(weights), "--save", str(outputs[name])]
        return [*command, *flags]

    commands = {
        TO_GGUF: ours(TO_GGUF, "--to", "gguf"),
        COPY: ["cp", str(outputs[TO_GGUF]), str(outputs[COPY])],
        TO_Q8: ours(TO_Q8, "--to", "gguf", "--dtype", "q8_0"),
        TO_HF: ours(TO_HF, "--to", "hf"),
    }
    if converter:
        files = ["--outfile", str(outputs[CONVERTER]), str(outputs[TO_HF])]
        commands[CONVERTER] = [*converter, "--outtype", "bf16", *files]
    return [(name, command, outputs[name]) for name, command in commands.items()]


def ratios(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The median over the rounds of each pair's ratio, with its target."""
    return [
        {
            "job": job,
            "peer": peer,
            "ratio": statistics.median(
                one / other for one, other in zip(seconds[job], seconds[peer], strict=True)
            ),
            "target": target,
        }
        for job, peer, target in RATIOS
        if {job, peer} <= seconds.keys()
    ]


def report(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{result['parameters'] / 1e9:.2f} billion parameters", ""]
    lines.append(f"{'':34}{'s':>7}{'CPU s':>7}{'MB':>8}   of each round, s")
    for name, values in result["seconds"].items():
        size = result["bytes"].get(name)
        shown = "" if size is None else f"{size / 1e6:.0f}"
        every = " ".join(f"{value:.2f}" for value in values)
        cpus = result["cpu_seconds"].get(name)
        cpu = "" if cpus is None else f"{statistics.median(cpus):.2f}"
        lines.append(f"{name:34}{statistics.median(values):7.2f}{cpu:>7}{shown:>8}   {every}")
    lines += ["", f"{'':44}{'ratio':>7}{'target':>8}"]
    for pair in result["ratios"]:
        target = "" if pair["target"] is None else f"{pair['target']:.2f}"
        lines.append(f"{pair['job'] + ' / ' + pair['peer']:44}{pair['ratio']:7.2f}{target:>8}")
    lines += ["", f"{'peak memory, MB':34}{'':7}{'limit':>8}"]
    for name, peak in result["peak_bytes"].items():
        limit = result["limit_bytes"][name]
        lines.append(f"  {name:32}{peak / 1e6:7.0f}{limit / 1e6:8.0f}")
    return "\n".join(lines)


def write_model(shape: Shape, folder: Path, target: Path) -> None:
    """Writes a folder of random weights in bf16, with a byte-level BPE of two merges."""
    import torch
    from tokenizers import pre_tokenizers

    from megatron_ds.config import ModelConfig, TokenizerConfig
    from megatron_ds.conversion.model_settings import ModelSettings
    from megatron_ds.conversion.registry import write
    from megatron_ds.conversion.source import SourceCheckpoint, declared_weights
    from megatron_ds.engine.states.state_reader import TensorReader
    from megatron_ds.model.declaration.architecture import DENSE

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel", "<|endoftext|>"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n", encoding="utf-8")
    tokenizer = TokenizerConfig(
        vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
    )
    model = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        ffn_hidden_size=shape.ffn,
        seq_length=2048,
        vocab_size=shape.vocab,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )

    def reader(dims: tuple[int, ...]) -> TensorReader:
        def load() -> torch.Tensor:
            return (0.02 * torch.randn(dims)).bfloat16()

        return TensorReader.full(dims, torch.bfloat16, load)

    weights = declared_weights(model, DENSE)
    tensors = {name: reader(tuple(weight.shape)) for name, weight in weights.items()}
    settings = ModelSettings.of(model, DENSE, tokenizer, len(letters) - 1)
    write(SourceCheckpoint(Path("random"), "random", settings, tensors), target, "native")


def run(command: Sequence[str], copied: Path | None) -> tuple[float, float, float]:
    """Runs a command.

    Args:
        command: The command.
        copied: File that is written to the disk afterwards, within the time.

    Returns:
        Seconds, CPU seconds, and the peak of its memory without mapped files, in bytes.

    Raises:
        RuntimeError: If it fails, with the end of what it printed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        start = time.perf_counter()
        used = _children_seconds()
        process = subprocess.Popen([*command], stdout=output, stderr=subprocess.STDOUT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(0.005)
        if copied is not None:
            with copied.open("rb") as file:
                os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        used = _children_seconds() - used
        if process.returncode != 0:
            output.seek(0)
            raise RuntimeError(f"{command[:3]} failed:\n{output.read()[-3000:]}")
    os.sync()
    return seconds, used, peak


def _children_seconds() -> float:
    """CPU seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _anonymous_bytes(process: int) -> int:
    """Memory of a process without mapped files; 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines() if line.startswith("RssAnon:"))
    return next((1024 * int(line[1]) for line in lines), 0)


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _remove(path: Path) -> None:
    for file in _files(path):
        file.unlink(missing_ok=True)
    if path.is_dir():
        path.rmdir()


def _drop(path: Path) -> None:
    """Makes the next read of the files read the disk."""
    for file in _files(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
