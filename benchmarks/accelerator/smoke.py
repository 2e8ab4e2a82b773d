"""Short runs of the features, compared with the same runs on the CPU.

The model is the demo's, on Python's standard library as text. fp32 runs must follow the CPU's
losses, runs of lower precision less closely. `write_references` makes the CPU's losses, the
tokenizer and the tokens beforehand, so that a device need not wait for them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.accelerator.models import BF16_STATES
from benchmarks.accelerator.processes import Outcome, Row, budget, flags, read_json, run
from benchmarks.common import write_json
from megatron_ds.launch.device import visible_devices

FP32_TOLERANCE = 1e-4
"""Largest relative difference of a loss from the CPU's run, over COMPARED iterations in fp32."""
LOW_TOLERANCE = 5e-2
"""Largest relative difference from the CPU's fp32 run in lower precision."""
COMPARED = 10
REFERENCES_FILE = "references.json"


@dataclass(frozen=True)
class Case:
    """Flags of a run beyond the common ones."""

    flags: Mapping[str, object] = field(default_factory=dict)
    reference: str | None = "cpu"
    """Key of REFERENCES whose losses it must follow; None: they must fall."""
    tolerance: float = FP32_TOLERANCE
    ranks: int = 1
    """Devices of the run; it is left out where there are fewer."""


DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "disable_bias_linear": True,
}
RMS_ROPE = {"normalization": "RMSNorm", "position_embedding_type": "rope"}
FAMILIES: dict[str, Mapping[str, object]] = {
    "qwen 3": {**LLAMA, "qk_layernorm": True, "kv_channels": 64},
    "llama 3.1, z-loss, fp32 residual": {
        **LLAMA,
        "use_rope_scaling": True,
        "z_loss_coeff": 1e-4,
        "fp32_residual_connection": True,
    },
    "gemma 2": {
        **RMS_ROPE,
        "activation": "geglu",
        "apply_layernorm_1p": True,
        "norm_position": "both",
        "disable_bias_linear": True,
        "num_query_groups": 2,
        "softmax_scale": 0.2,
        "attn_logit_softcapping": 50,
        "final_logit_softcapping": 30,
        "window_size": "63,0",
        "window_attn_skip_freq": 2,
    },
    "gpt-oss": {
        "normalization": "RMSNorm",
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4,
        "yarn_original_max_position_embeddings": 64,
        "activation": "quick-geglu",
        "activation_func_clamp_value": 7,
        "glu_linear_offset": 1,
        "num_query_groups": 2,
        "softmax_type": "learnable",
        "window_size": "63,0",
        "window_attn_skip_freq": 2,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_router_bias": True,
    },
    "deepseek 3": {
        **RMS_ROPE,
        "swiglu": True,
        "disable_bias_linear": True,
        "multi_latent_attention": True,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_head_dim": 32,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 32,
        "qk_layernorm": True,
        "num_experts": 8,
        "expert_interval": 2,
        "moe_ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "moe_router_topk": 2,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.001,
        "mtp_num_layers": 1,
    },
    "gated, parallel, alibi": {
        "position_embedding_type": "alibi",
        "attention_output_gate": True,
        "parallel_residual": "shared",
    },
}
"""Family or parts -> flags of a run that has them."""
REFERENCES: dict[str, Mapping[str, object]] = {
    "cpu": {},
    "cpu documents": DOCUMENTS,
    **FAMILIES,
}
"""Name -> flags of a run on the CPU."""
CASES = {
    "bf16": Case({"bf16": True}, tolerance=LOW_TOLERANCE),
    "fp32": Case(),
    "fp16": Case({"fp16": True}, tolerance=LOW_TOLERANCE),
    **{f"zero {stage}": Case({"zero_stage": stage}) for stage in (2, 3)},
    "eager bf16": Case({"no_compile": True, "bf16": True}, tolerance=LOW_TOLERANCE),
    "documents bf16": Case({**DOCUMENTS, "bf16": True}, "cpu documents", LOW_TOLERANCE),
    "optimizer on the host": Case({"zero_stage": 2, "cpu_optimizer": True}),
    "parameters on the host": Case(
        {"zero_stage": 3, "cpu_optimizer": True, "remote_device": "cpu"}
    ),
    "eager": Case({"no_compile": True}),
    "documents": Case(DOCUMENTS, "cpu documents"),
    **{
        f"bf16 zero {stage}": Case({"bf16": True, "zero_stage": stage}, tolerance=LOW_TOLERANCE)
        for stage in (2, 3)
    },
    "fp16 zero 2": Case({"fp16": True, "zero_stage": 2}, tolerance=LOW_TOLERANCE),
    "zero 0": Case({"zero_stage": 0}),
    "full recomputation": Case({"recompute_granularity": "full", "recompute_method": "uniform"}),
    "selective recomputation": Case({"recompute_granularity": "selective"}),
    "dropout": Case({"attention_dropout": 0.1, "hidden_dropout": 0.1}, reference=None),
    "bf16 dropout": Case(
        {"bf16": True, "attention_dropout": 0.1, "hidden_dropout": 0.1}, reference=None
    ),
    "llama bf16": Case({"bf16": True, **LLAMA}, reference=None),
    "moe bf16": Case({"bf16": True, "num_experts": 4, "moe_router_topk": 2}, reference=None),
    "bf16 states": Case({"bf16": True, **BF16_STATES}, tolerance=LOW_TOLERANCE),
    "muon bf16": Case({"bf16": True, "optimizer": "muon"}, reference=None),
    "eager zero 3": Case({"zero_stage": 3, "no_compile": True}),
    "tensor-parallel": Case({"tensor_model_parallel_size": 2}, ranks=2),
    "sequence-parallel bf16": Case(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
        tolerance=LOW_TOLERANCE,
        ranks=2,
    ),
    "zero 3 of 2 ranks": Case({"zero_stage": 3}, ranks=2),
    "ulysses": Case({"ds_sequence_parallel_size": 2, "zero_stage": 1}, ranks=2),
    "context-parallel": Case({"context_parallel_size": 2, "zero_stage": 1}, ranks=2),
    "context-parallel bf16": Case(
        {"context_parallel_size": 2, "zero_stage": 1, "bf16": True},
        tolerance=LOW_TOLERANCE,
        ranks=2,
    ),
    "context-parallel bf16, gathered": Case(
        {
            "context_parallel_size": 2,
            "cp_comm_type": "all_gather",
            "zero_stage": 1,
            "bf16": True,
        },
        tolerance=LOW_TOLERANCE,
        ranks=2,
    ),
    "expert-parallel bf16": Case(
        {"bf16": True, "num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2},
        reference=None,
        ranks=2,
    ),
    **{name: Case(values, name) for name, values in FAMILIES.items()},
    **{
        f"{name}, bf16": Case({**values, "bf16": True}, name, LOW_TOLERANCE)
        for name, values in FAMILIES.items()
    },
    **{
        f"{name}, bf16, zero {stage}": Case(
            {**FAMILIES[name], "bf16": True, "zero_stage": stage}, name, LOW_TOLERANCE
        )
        for name, stage in (("deepseek 3", 2), ("gemma 2", 3))
    },
}
"""Name -> run, the most telling ones first. Text is generated from the checkpoint of "fp32"."""
TINY = ("fp32", "bf16")
"""Cases of the tiny size, if none are named."""


def write_references(folder: Path, iterations: int, *, tiny: bool = False) -> Iterator[Row]:
    """Make text, tokenizer and tokens, and train on the CPU.

    Args:
        folder: Empty folder, which can be moved to another machine.
        iterations: Iterations of each run.
        tiny: Train a tiny model on a few of the documents.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        name: value.name if isinstance(value, Path) else value
        for name, value in _data(folder, tiny).items()
    }
    (folder / "corpus.jsonl").unlink()
    common = {"data": data, "flags": {**_model(tiny), "train_iters": iterations}}
    losses = {}
    for name, more in REFERENCES.items():
        with tempfile.TemporaryDirectory() as temporary:
            save = Path(temporary)
            end = _train(save, {**_flags(folder, common), **more}, cpu=True)
            losses[name] = _losses(save)
        yield {"name": name, **end.describe(), "losses": losses[name], "passed": end.status == 0}
    write_json(folder / REFERENCES_FILE, {**common, "losses": losses})


def measure(prepared: Path, *, names: Sequence[str] = (), jobs: int = 1) -> Iterator[Row]:
    """Run the cases, and generate text from the checkpoint of "fp32" on both devices.

    Args:
        prepared: Folder of `write_references`.
        names: Cases to run; empty: all.
        jobs: Runs at a time.
    """
    known = read_json(prepared / REFERENCES_FILE)
    common = _flags(prepared, known)
    references = known["losses"]
    devices = visible_devices() or 1
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        folder = Path(temporary)

        def run_case(name: str) -> Row:
            if not budget.left:
                return {"name": name, "skipped": "no time is left"}
            case = CASES[name]
            if case.ranks > devices:
                return {"name": name, "skipped": f"needs {case.ranks} devices"}
            save = folder / name.replace(" ", "-")
            end = _train(save, {**common, **case.flags}, ranks=case.ranks)
            return _judge(name, end, _losses(save), references)

        runs = [pool.submit(run_case, name) for name in names or CASES]
        for done in as_completed(runs):
            yield done.result()
        if (folder / "fp32").exists():
            yield _generate(folder)


def lines(row: Row) -> Iterator[str]:
    """Format the outcome of a case."""
    difference = row.get("difference")
    detail = "" if difference is None else f"differs by {difference:.1e} at most"
    verdict = "passed" if row["passed"] else "FAILED"
    yield f"{row['name']:26}{verdict:8}{row['wall_seconds']:7.1f} s  {detail}"
    yield from ("    " + line for line in row.get("output", "").splitlines()[-8:])


def _data(folder: Path, tiny: bool) -> dict[str, object]:
    """Make a corpus, a tokenizer and token files; return the flags that name them."""
    corpus = folder / "corpus.jsonl"
    tokens = folder / "text"
    tokenizer = {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": folder / "vocab.json",
        "merge_file": folder / "merges.txt",
    }
    steps: list[tuple[str, dict[str, object]]] = [
        ("make_corpus", {"output": corpus}),
        ("train_tokenizer", {"input": corpus, "vocab_size": 4096, "output_dir": folder}),
        (
            "preprocess_data",
            {"input": corpus, "output_prefix": tokens, "append_eod": True, **tokenizer},
        ),
    ]
    for name, values in steps:
        done = run([f"tools/{name}.py", *flags(values)], cpu=True)
        if done.status:
            raise RuntimeError(f"tools/{name}.py failed:\n{done.output}")
        if tiny and name == "make_corpus":
            first = corpus.read_text(encoding="utf-8").splitlines(keepends=True)[:60]
            corpus.write_text("".join(first), encoding="utf-8")
    return {"data_path": folder / "text_text_document", **tokenizer}


def _flags(folder: Path, known: Row) -> dict[str, object]:
    """Flags of all runs, with the paths of the folder's files."""
    data = {
        name: value if name == "tokenizer_type" else folder / value
        for name, value in known["data"].items()
    }
    return {**data, **known["flags"]}


def _model(tiny: bool) -> dict[str, object]:
    shape = (2, 64, 4, 64) if tiny else (4, 192, 6, 256)
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return {
        **dict(zip(names, shape, strict=True)),
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "lr": 1e-3,
        "split": "90,5,5",
        "eval_iters": 1,
        "log_interval": 1,
    }


def _train(
    save: Path, values: Mapping[str, object], *, cpu: bool = False, ranks: int = 1
) -> Outcome:
    checkpoint = {"save": save, "save_interval": values["train_iters"]}
    launcher: list[object] = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return run([*launcher, "pretrain_gpt.py", *flags({**values, **checkpoint})], cpu=cpu)


def _losses(save: Path) -> list[float]:
    file = save / "metrics.jsonl"
    if not file.exists():
        return []
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [record["lm_loss"] for record in records if "lm_loss" in record]


def _judge(
    name: str, end: Outcome, losses: list[float], references: Mapping[str, list[float]]
) -> Row:
    case = CASES[name]
    row = {"name": name, **end.describe(), "losses": losses}
    passed = end.status == 0
    if case.reference is not None and passed:
        pairs = list(zip(losses, references[case.reference], strict=False))[:COMPARED]
        row["difference"] = max((abs(a / b - 1) for a, b in pairs), default=float("inf"))
        passed = row["difference"] <= case.tolerance
    elif passed:
        passed = bool(losses) and losses[-1] < losses[0]
    return {**row, "passed": passed}


def _generate(folder: Path) -> Row:
    """Greedy text of both devices from one checkpoint must be equal."""
    values = {"load": folder / "fp32", "greedy": True, "out_seq_length": 16}
    texts: list[str | None] = []
    row: Row = {"name": "generation"}
    for cpu in (True, False):
        output = folder / f"text-{cpu}.txt"
        words = flags({**values, "sample_output_file": output})
        prompts = ["--prompt", "def __init__(self", "import os"]
        row |= run(["tools/generate_samples_gpt.py", *words, *prompts], cpu=cpu).describe()
        texts.append(output.read_text(encoding="utf-8") if output.exists() else None)
    return {**row, "passed": texts[0] is not None and texts[0] == texts[1]}
