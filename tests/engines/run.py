"""Runs exported models in inference engines, and compares them with the models of this program.

    make proofs ONLY=engines                   all engines
    python tests/engines/run.py mlx vllm       some

Each engine has an environment of its own in build/engines, from prebuilt wheels; one that the index
has no wheels of for this machine is skipped. Every model of models.yaml is exported, and each
engine computes its log probabilities of 128 tokens and continues a text. They are equal within
1e-3, or the table of facts (megatron_ds/conversion/engines/facts.toml) has the reason: a fact
without effect is a failure, too. The record is results.json, from which docs/use/engines.md is
written after each model.

What an engine has computed is kept in build/engines/computed, by the bytes of the export and what
else the engine was given. A run that was interrupted, or reached its time limit, is continued by
the same command, and judges again what is kept. Models that are not reached keep their record, as
far as it is of the same version of the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from megatron_ds.config.problems import UserError  # noqa: E402 (the path is set now)
from megatron_ds.conversion.engines.facts import (  # noqa: E402
    CLOSE,
    DIFFERS,
    ENGINES,
    REFUSES,
)
from tests.engines.computed import ENVIRONMENTS, HERE, Computed  # noqa: E402
from tests.engines.models import MODELS, NEW, Exported, exported, write_tokenizer  # noqa: E402
from tests.pages import engines as page  # noqa: E402
from tests.reports import machine  # noqa: E402

RESULTS = HERE / "results.json"
EQUAL = 1e-3
"""Difference of two log probabilities in fp32."""
SLOW = ("openvino", "vllm")
"""Engines that need minutes, which run last."""
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that engines require and that no model of texts needs."""
SECONDS = 1800
"""Time limit of an engine; the models that it does not reach are the first ones of the next run."""
TIMEOUT = "timeout"
EQUALS = "equal"
CLOSE_TO = "close"
DIFFERENT = "differs"
REFUSED = "refused"
CRASHED = "crashed"
Record = dict[str, Any]


def environment(engine: str) -> Path | None:
    """The interpreter of an engine's environment, which is made if it is missing; None if a wheel
    is missing for this machine."""
    folder = ENVIRONMENTS / engine
    python = folder / "bin" / "python"
    requirements = HERE / "requirements" / f"{engine}.txt"
    done = folder / "installed.txt"
    text = requirements.read_text(encoding="utf-8")
    if done.exists() and done.read_text(encoding="utf-8") == text:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    command = [*install, "--disable-pip-version-check", "-r", str(requirements)]
    if subprocess.run(command, check=False).returncode != 0:
        return None
    # Of images and sound, and of another build than torch's if torch is not the index's own.
    remove = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED]
    subprocess.run(remove, check=True)
    done.write_text(text, encoding="utf-8")
    return python


def run_engine(
    engine: str, python: Path, models: Sequence[Exported], folder: Path, computed: Computed
) -> Iterator[tuple[str, Record]]:
    """Runs models in an engine, and yields what it made of each, first of those that are kept.

    A model with which the process dies is crashed; the next ones run in another process.

    Args:
        engine: Its name.
        python: Interpreter of its environment.
        models: The models.
        folder: Folder for files that are not kept.
        computed: What it has computed before.

    Raises:
        RuntimeError: If the engine cannot be started.
    """
    cases = []
    for model in models:
        try:
            path = model.written(engine)
        except UserError as error:
            yield model.name, {"outcome": REFUSED, "error": _line(error)}
            continue
        case = {"ids": model.ids, "prompt": model.prompt, "new": NEW}
        key = computed.key(path, case)
        if (result := computed.result(key)) is not None:
            yield model.name, outcome(model, engine, result, computed.values(key))
            continue
        computed.forget(key)
        scratch = folder / engine / model.name
        scratch.mkdir(parents=True, exist_ok=True)
        cases.append(
            {**case, "name": model.name, "key": key, "model": str(path), "scratch": str(scratch)}
        )
    by_name: dict[str, Exported] = {model.name: model for model in models}
    deadline = time.monotonic() + SECONDS
    job = folder / engine / "job.json"
    log = folder / engine / "log.txt"
    while cases:
        job.parent.mkdir(parents=True, exist_ok=True)
        job.write_text(
            json.dumps({"cases": cases, "folder": str(computed.folder)}), encoding="utf-8"
        )
        ended = _run_runner([str(python), str(computed.runner), str(job)], log, deadline)
        done = 0
        while done < len(cases):
            key = cases[done]["key"]
            if (result := computed.result(key)) is None:
                break
            model = by_name[cases[done]["name"]]
            yield model.name, outcome(model, engine, result, computed.values(key))
            done += 1
        cases = cases[done:]
        if ended == TIMEOUT:
            return
        if cases:
            end = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            if not computed.has_begun(cases[0]["key"]):
                raise RuntimeError(f"{computed.runner.name}: {(end or [ended])[0]}")
            yield cases[0]["name"], {"outcome": CRASHED, "error": (end or [ended])[0][:200]}
            cases = cases[1:]


def _run_runner(command: list[str], log: Path, deadline: float) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=variables,
                timeout=max(deadline - time.monotonic(), 1),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TIMEOUT
    return f"status {done.returncode}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def judged(model: Exported, engine: str, difference: float) -> str:
    """What a difference of log probabilities is."""
    facts = model.facts(engine)
    limits = [fact.difference or 0 for fact in facts if fact.effect == CLOSE]
    if difference <= EQUAL:
        return EQUALS
    return CLOSE_TO if any(difference <= limit for limit in limits) else DIFFERENT


def outcome(model: Exported, engine: str, result: Record, values: Path) -> Record:
    """What an engine made of a model."""
    kept = {"seconds": result["seconds"]}
    if values.exists():
        theirs = np.load(values)
        expected = model.log_probabilities.numpy()
        if theirs.ndim == 1:
            expected = expected[np.arange(len(model.ids) - 1), model.ids[1:]]
        else:
            theirs = theirs[:, : expected.shape[1]]
        is_known = ~np.isnan(theirs)
        difference = float(np.abs(theirs - expected)[is_known].max())
        kept |= {"outcome": judged(model, engine, difference), "difference": difference}
        if "text" in result:
            text, margin = model.continuation
            if margin > 2 * EQUAL:  # otherwise rounding decides
                kept["same text"] = _comparable(result["text"]) == _comparable(text)
        elif "error" in result:
            kept["error"] = result["error"]
        return kept
    return kept | {"outcome": REFUSED, "error": result.get("error", "")}


def _comparable(text: str) -> str:
    """A text up to the first bytes that are no character, which engines decode differently, and
    without blanks at its ends."""
    return text.partition("\ufffd")[0].strip()


def failure(model: Exported, engine: str, record: Record) -> str | None:
    """Why a result is not what the table of facts says; None if it is."""
    facts = model.facts(engine)
    effects = {fact.effect for fact in facts}
    found = record["outcome"]
    if found in (EQUALS, CLOSE_TO):
        if effects & {REFUSES, DIFFERS}:
            return f"{found}, though the table says {sorted(effects)}"
        if found == EQUALS and (not record.get("same text", True) or "error" in record):
            return f"equal, but another text, or none: {record.get('error')}"
        return None
    if found == DIFFERENT:
        if DIFFERS in effects:
            return None
        return f"differs by {record['difference']:.1e}, and the table has no reason"
    if effects & {REFUSES, DIFFERS}:
        return None
    return f"{found}, and the table has no reason: {record.get('error')}"


def versions(python: Path) -> dict[str, str]:
    """Versions of the packages in an environment."""
    command = [str(python), "-m", "pip", "list", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {entry["name"]: entry["version"] for entry in json.loads(done.stdout)}


def read_results() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def run_all(engines: Sequence[str] = (), names: Sequence[str] = ()) -> Record:
    """Runs engines and writes their record and page.

    Args:
        engines: Names of engines; empty: all.
        names: Names of models; empty: all.

    Returns:
        Counts and failures, as the other sections of the proofs have them. Models that were not
        reached are skipped.
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("ENGINES_SCRATCH")) as scratch:
        folder = Path(scratch)
        (folder / "tokenizer").mkdir()
        write_tokenizer(folder / "tokenizer")
        models = [exported(name, folder / name, folder / "tokenizer") for name in names or MODELS]
        by_name = {model.name: model for model in models}
        for engine in engines or sorted(ENGINES, key=SLOW.__contains__):
            print(f"== {ENGINES[engine].title}", flush=True)
            python = environment(engine)
            if python is None:
                print(f"{ENGINES[engine].title} is skipped: no wheel for this machine")
                counts["skipped"] += len(models)
                continue
            installed = versions(python)
            reached = 0
            try:
                for name, record in run_engine(engine, python, models, folder, Computed(engine)):
                    reached += 1
                    record_case(engine, installed, name, record, scratch)
                    reason = failure(by_name[name], engine, record)
                    counts["failed" if reason else "passed"] += 1
                    if reason:
                        failures[f"{engine} {name}"] = reason
                    end = f"FAILED: {reason}" if reason else ""
                    print(f"{name:20} {_shown(record)} {end}", flush=True)
            except RuntimeError as error:  # the engine does not start
                counts["failed"] += 1
                failures[engine] = str(error)
                print(f"FAILED: {error}")
            counts["skipped"] += len(models) - reached
            if reached < len(models):
                print(f"{len(models) - reached} models are not reached; run it again", flush=True)
    return {**counts, "failures": failures, "tests": {}}


def record_case(
    engine: str, installed: Mapping[str, str], name: str, record: Record, scratch: str
) -> None:
    """Adds a result to the record of an engine, and writes the page.

    Args:
        engine: The engine.
        installed: Versions of its packages. Results of another version of it are removed.
        name: The model.
        record: What the engine made of it.
        scratch: Folder whose name messages may have.
    """
    results = read_results()  # another process may have added an engine
    version = installed.get(ENGINES[engine].package, "?")
    before = results.get(engine, {})
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    cases = before.get("cases", {}) if before.get("version") == version else {}
    cases = {model: case for model, case in cases.items() if model in MODELS}
    cases[name] = {**record, "date": today}
    results[engine] = {
        "version": version,
        "transformers": installed.get("transformers", ""),
        "machine": f"{machine()}, {platform.machine()}",
        "date": today,
        "seconds": round(sum(case.get("seconds", 0) for case in cases.values())),
        "cases": cases,
    }
    text = json.dumps(results, indent=1, sort_keys=True).replace(scratch, "SCRATCH")
    RESULTS.write_text(f"{text}\n", "utf-8")
    page.OUTPUT.write_text(page.page(), encoding="utf-8")


def _shown(record: Record) -> str:
    difference = f" {record['difference']:.1e}" if "difference" in record else ""
    text = "" if record.get("same text", True) else ", another text"
    error = f": {record['error']}" if "error" in record else ""
    return f"{record['outcome']}{difference}{text}{error}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(ENGINES)}; default: all")
    parser.add_argument("--models", nargs="*", default=(), help="models; default: all")
    options = parser.parse_args(argv)
    for names, known in ((options.engines, ENGINES), (options.models, MODELS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    record = run_all(options.engines, options.models)
    print({name: record[name] for name in ("passed", "failed", "skipped")})
    for name, reason in record["failures"].items():
        print(f"{name}: {reason}")
    return int(record["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
