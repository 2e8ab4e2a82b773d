"""What becomes of the flags of Megatron-LM and the Megatron-DeepSpeed forks that are no knob here.

Pure data, read by `arguments.py`, by tools/preprocess_data.py and by tools/make_docs.py. A flag
is dropped with a warning only if it cannot change what is learned: it sets speed, memory, the
logs, files that are written otherwise here, or a program other than GPT pretraining. Everything
else is refused, except at the values at which it asks for what is done anyway. Knows no argparse
and no configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

Takes = int | str
"""Number of values that a flag takes; "*": any number."""


@dataclass(frozen=True)
class ForeignFlag:
    """One flag. words: why it has no effect, or what to use instead. same: values at which a
    refused flag is accepted without a word."""

    takes: Takes
    words: str
    same: tuple[str, ...] = ()


def _flags(
    words: str,
    *,
    switches: str = "",
    valued: str = "",
    lists: str = "",
    same: tuple[str, ...] = (),
) -> dict[str, ForeignFlag]:
    """The same words for several flags, by the number of values they take: none, one or any."""
    named: tuple[tuple[Takes, str], ...] = ((0, switches), (1, valued), ("*", lists))
    return {
        flag: ForeignFlag(takes, words, same) for takes, flags in named for flag in flags.split()
    }


FIXED_VALUES: dict[str, tuple[str, str | bool, str]] = {
    "swiglu": ("activation", "swiglu", "the same as --activation swiglu"),
    "openai-gelu": ("activation", "openai-gelu", "the same as --activation openai-gelu"),
    "squared-relu": ("activation", "squared-relu", "the same as --activation squared-relu"),
    "accumulate-allreduce-grads-in-fp32": (
        "accumulate_allreduce_grads_in_fp32",
        True,
        "the default",
    ),
    "use-rotary-position-embeddings": (
        "position_embedding_type",
        "rope",
        "the same as --position-embedding-type rope",
    ),
}
"""Flags without a value that stand for a value of a field: flag -> (field, value, help)."""

NO_OP: dict[str, ForeignFlag] = {
    **_flags("softmax is computed in fp32", switches="attention-softmax-in-fp32"),
    **_flags(
        "there is no such fused kernel to turn off",
        switches="no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion "
        "no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion "
        "disable-mem-efficient-ln",
    ),
    **_flags("one pipeline stage needs no pipeline engine", switches="no-pipeline-parallel"),
    **_flags("query-key layer scaling does not exist here", switches="no-query-key-layer-scaling"),
    **_flags(
        "weights are drawn on the CPU, from one seed per name", switches="use-cpu-initialization"
    ),
    **_flags(
        "a signal saves, ends the run and sets the exit status", switches="exit-signal-handler"
    ),
    **_flags(
        "the schedule follows the flags of the command line, on a resume too",
        switches="override-lr-scheduler override-opt_param-scheduler",
    ),
    **_flags("throughput stands in every log line", switches="log-throughput"),
    **_flags(
        "random states are functions of the seed and the data's position",
        switches="no-load-rng no-save-rng",
    ),
    **_flags(
        "attention is causal without a mask from the loader",
        switches="no-create-attention-mask-in-dataloader",
    ),
}
"""Switches that ask for what every run does: accepted without a word."""

IGNORED: dict[str, ForeignFlag] = {
    # Kernels and speed.
    **_flags(
        "scaled_dot_product_attention takes the fastest kernel there is",
        switches="use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton "
        "use-flash-attn-builder",
    ),
    **_flags(
        "there is one implementation of the layers", switches="use-mcore-models use-legacy-models"
    ),
    **_flags("there is one implementation of the layers", valued="transformer-impl"),
    **_flags(
        "attention scores are scaled once, and their softmax is in fp32",
        switches="apply-query-key-layer-scaling",
    ),
    **_flags("there is one implementation of the loss", switches="cross-entropy-loss-fusion"),
    **_flags(
        "there are no fused kernels with constraints",
        switches="abort-on-unmet-fused-kernel-constraints",
    ),
    **_flags(
        "how tensor-parallel communication overlaps is fixed",
        switches="no-async-tensor-model-parallel-allreduce tp-comm-overlap "
        "tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad "
        "disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag "
        "disable-tp-comm-split-rs defer-embedding-wgrad-compute "
        "no-clone-scatter-output-in-embedding",
        valued="tp-comm-overlap-cfg wgrad-deferral-limit",
    ),
    **_flags("NCCL reads its environment variables", valued="nccl-communicator-config-path"),
    **_flags(
        "Python's garbage collector is left alone",
        switches="manual-gc no-manual-gc-eval",
        valued="manual-gc-interval",
    ),
    **_flags("the allocator's cache is never emptied", valued="empty-unused-memory-level"),
    # Data parallelism and the optimizer's memory: DeepSpeed's.
    **_flags(
        "data parallelism is DeepSpeed's",
        switches="use-contiguous-buffers-in-ddp no-contiguous-buffers-in-local-ddp "
        "ddp-average-in-collective delay-param-gather no-delay-grad-reduce",
        valued="DDP-impl",
    ),
    **_flags(
        'data parallelism is DeepSpeed\'s: set zero_optimization "overlap_comm", '
        '"reduce_bucket_size" and "allgather_bucket_size" in --deepspeed_config',
        switches="overlap-grad-reduce overlap-param-gather",
        valued="ddp-bucket-size",
    ),
    **_flags(
        "--zero-stage says what is cut over data-parallel ranks; its default, 1, cuts the "
        "optimizer states",
        switches="use-distributed-optimizer",
    ),
    **_flags(
        "never read in the forks either: set the keys of zero_optimization in --deepspeed_config",
        switches="zero-contigious-gradients zero-reduce-scatter use-pin-memory",
        valued="zero-allgather-bucket-size zero-reduce-bucket-size",
    ),
    **_flags(
        "without effect in the forks, too",
        switches="memory-centric-tiled-linear scattered-embeddings split-transformers "
        "no-load-lr-state",
        valued="tile-factor",
    ),
    **_flags(
        "--optimizer adam is torch's fused AdamW, or DeepSpeed's for states that --cpu-optimizer "
        "keeps in host memory",
        switches="ds_fused_adam cpu_torch_adam",
    ),
    **_flags(
        "parameters that every tensor-parallel rank holds get the same gradient on each",
        switches="sync-tp-duplicated-parameters",
    ),
    **_flags(
        "a step whose gradient is not finite is always found, counted and skipped",
        switches="no-check-for-nan-in-loss-and-grad",
    ),
    **_flags("weights are always drawn, and a resume replaces them", switches="no-initialization"),
    # Pipeline parallelism, which --pipeline-model-parallel-size alone turns on.
    **_flags(
        "only read with several pipeline stages",
        switches="no-scatter-gather-tensors-in-pipeline overlap-p2p-communication "
        "no-overlap-p2p-communication use-ring-exchange-p2p use-tp-pp-dp-mapping",
        valued="pp-partition-method",
    ),
    # Data.
    **_flags("only read with --dataloader-type cyclic", switches="no-data-sharding"),
    **_flags("validation batches are read by the training process", valued="valid-num-workers"),
    **_flags("indexes are built by one process and cached", valued="num-dataset-builder-threads"),
    **_flags("token files are always mapped to memory", switches="no-mmap-bin-files"),
    # Logs and monitoring.
    **_flags(
        "there is no Weights & Biases writer; --tensorboard-dir and --metrics-jsonl hold the "
        "same numbers",
        valued="wandb-exp-name wandb-project wandb-save-dir",
    ),
    **_flags(
        "NVIDIA's one-logger is not used",
        switches="no-one-logger one-logger-async",
        valued="one-logger-project one-logger-run-name app-tag-run-name app-tag-run-version",
    ),
    **_flags(
        "there is no straggler detector",
        switches="log-straggler disable-straggler-on-startup",
        valued="straggler-ctrlr-port straggler-minmax-count",
    ),
    **_flags(
        "steps are timed whole: the parts of a step have no timers",
        switches="no-barrier-with-level-1-timing",
        valued="timing-log-level timing-log-option",
    ),
    **_flags("the zeros in the gradient are not counted", switches="log-num-zeros-in-grad"),
    **_flags(
        "the optimizer's states are not logged", switches="log-optimizer-states-to-tensorboard"
    ),
    **_flags(
        "the first and the last rank print, at one level",
        valued="log-level log-level-replica logging-level",
    ),
    **_flags(
        "the settings are printed, and saved in run.json of each checkpoint", valued="log-path"
    ),
    **_flags("the run's own output tells its progress", switches="log-progress"),
    **_flags("the fork's code for it is switched off, too", valued="codecarbon-dir"),
    **_flags(
        "there is no profiler; run the command under one",
        valued="profile_steps profile-step-start profile-step-end",
        lists="profile profile-ranks",
    ),
    # Checkpoints' files.
    **_flags(
        "checkpoints have one format, which every rank writes and reads its part of",
        switches="use-dist-ckpt auto-detect-ckpt-format ckpt-assume-constant-structure "
        "ckpt-fully-parallel-load ckpt-fully-parallel-save no-ckpt-fully-parallel-save",
        valued="dist-ckpt-format dist-ckpt-strictness",
    ),
    **_flags("the run waits until a checkpoint is written", switches="async-save"),
    # Companions of flags that are refused: alone they do nothing in the peers either.
    **_flags(
        "only read with mixture of experts, which --num-experts would turn on",
        switches="create-moe-param-group disable-moe-token-dropping "
        "disable-moe-top2-2nd-expert-sampling enable-expert-tensor-parallelism moe-extended-tp "
        "moe-grouped-gemm moe-layer-recompute moe-pad-expert-input-to-capacity "
        "moe-per-layer-logging moe-router-pre-softmax use-tutel",
        valued="expert-interval moe-aux-loss-coeff moe-eval-capacity-factor "
        "moe-expert-capacity-factor moe-input-jitter-eps moe-loss-coeff moe-min-capacity "
        "moe-router-load-balancing-type moe-router-topk moe-token-dispatcher-type "
        "moe-token-drop-policy moe-train-capacity-factor moe-z-loss-coeff mlp-type topk",
    ),
    **_flags(
        "only read with fp8",
        switches="no-fp8-wgrad",
        valued="fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin",
    ),
    **_flags(
        "only read with --ds-sequence-parallel-fpdt",
        switches="ds-sequence-parallel-fpdt-offloading",
        valued="ds-sequence-parallel-fpdt-chunk-size",
    ),
    **_flags(
        "only read with --kd",
        valued="kd-alpha-ce kd-beta-ce kd-temp hidden-size-teacher load-teacher "
        "num-attention-heads-teacher num-layers-teacher",
        lists="num-experts-teacher",
    ),
    **_flags("only read with --adlr-autoresume", valued="adlr-autoresume-interval"),
    # Other programs of the peers, whose flags their pretrain_gpt.py takes and never reads.
    **_flags(
        "only for BERT, T5 and retrieval models",
        switches="bert-no-binary-head biencoder-shared-query-context-model "
        "output-bert-embeddings retriever-score-scaling retro-no-verify-neighbor-count "
        "retro-return-doc-ids use-one-sent-docs",
        valued="bert-embedder-type bert-load biencoder-projection-dim block-data-path "
        "decoder-num-layers decoder-seq-length embedding-path evidence-data-path ict-head-size "
        "ict-load indexer-batch-size indexer-log-interval mask-prob mean-noise-span-length "
        "noise-density pipeline-model-parallel-split-rank query-in-block-prob "
        "retriever-seq-length retro-attention-gate retro-cyclic-train-iters "
        "retro-encoder-attention-dropout retro-encoder-hidden-dropout retro-encoder-layers "
        "retro-num-neighbors retro-num-retrieved-chunks retro-project-dir retro-workdir "
        "sample-rate short-seq-prob titles-data-path",
        lists="retriever-report-topk-accuracies",
    ),
    **_flags(
        "only for vision models",
        switches="dino-norm-last-layer vision-pretraining",
        valued="classes-fraction data-per-class-fraction dino-bottleneck-size "
        "dino-freeze-last-layer dino-head-hidden-size dino-local-crops-number "
        "dino-local-img-size dino-teacher-temp dino-warmup-teacher-temp "
        "dino-warmup-teacher-temp-epochs img-dim img-h img-w iter-per-epoch mask-factor "
        "mask-type num-channels num-classes patch-dim swin-backbone-type "
        "vision-backbone-type vision-pretraining-type",
    ),
    **_flags(
        "only for Mamba models",
        valued="hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern",
    ),
    **_flags(
        "only for generation",
        valued="inference-batch-times-seqlen-threshold max-tokens-to-oom",
    ),
}
"""Flags that are read and dropped with a warning that gives the reason."""

_NOT_MODEL = "the model has no such part; leave the flag out"
_NO_EXPERTS = "mixture of experts is not there yet; leave the flag out"
_NO_SEQUENCE = (
    "sequence parallelism is not there yet; leave the flag out (--recompute-granularity full and "
    "--tensor-model-parallel-size save memory, too)"
)
_NO_PIPELINE = "pipeline parallelism is not there yet; use --tensor-model-parallel-size"
_NO_WEIGHTS = (
    "a run starts from random weights or resumes a checkpoint as a whole, with --load; leave the "
    "flag out"
)

REFUSED: dict[str, ForeignFlag] = {
    # Numerics and the model.
    **_flags("the loss is computed in fp32; leave the flag out", switches="fp16-lm-cross-entropy"),
    **_flags(
        "the residual stream has the type of --bf16 or --fp16; leave the flag out, or leave those "
        "out for fp32 throughout",
        switches="fp32-residual-connection",
    ),
    **_flags(
        "the embedding is kept in the type of --bf16 or --fp16 with an fp32 master copy; leave "
        "the flag out",
        switches="embedding-weights-in-fp32",
    ),
    **_flags(
        "fp8 is not there; leave the flag out and train with --bf16",
        switches="fp8-e4m3 fp8-hybrid",
        valued="fp8-format",
    ),
    **_flags(
        _NOT_MODEL,
        switches="apply-residual-connection-post-layernorm apply-layernorm-1p qk-layernorm "
        "rotary-interleaved retro-add-retriever",
        valued="rotary-seq-len-interpolation-factor",
        lists="spec",
    ),
    **_flags(
        "weights are normal with --init-method-std; leave the flag out",
        switches="init-method-xavier-uniform",
    ),
    **_flags(
        "all data-parallel ranks start from the same weights; leave the flag out",
        switches="data-parallel-random-init",
    ),
    **_flags(
        "for the exact gelu give --no-bias-gelu-fusion; otherwise leave the flag out",
        valued="onnx-safe",
    ),
    **_flags(
        "give --make-vocab-size-divisible-by N, which pads to N if N is not below the vocabulary",
        valued="pad-vocab-size-to",
    ),
    **_flags(_NO_EXPERTS, lists="num-experts", same=("1",)),
    **_flags(
        _NO_EXPERTS,
        valued="moe-expert-parallel-size expert-model-parallel-size",
        same=("1",),
    ),
    **_flags(_NO_EXPERTS, valued="num-experts-switch"),
    # Layout.
    **_flags(_NO_SEQUENCE, switches="sequence-parallel"),
    **_flags(_NO_SEQUENCE, switches="force-ds-sequence-parallel ds-sequence-parallel-fpdt"),
    **_flags(_NO_SEQUENCE, valued="context-parallel-size ds-sequence-parallel-size", same=("1",)),
    **_flags(
        _NO_PIPELINE,
        switches="enable-zbh1-pipeline enable-zbh1-exact-semantics standalone-embedding-stage",
        valued="num-layers-per-virtual-pipeline-stage",
    ),
    **_flags("process groups are made at start; leave the flag out", valued="lazy-mpu-init"),
    **_flags(
        "recomputation goes in units of --recompute-num-layers through the whole model, which is "
        "uniform; leave the flag out",
        valued="recompute-method",
        same=("uniform",),
    ),
    # Optimizer and schedule.
    **_flags(
        "the optimizer's states are fp32; leave the flag out. --zero-stage and --cpu-optimizer "
        "save memory",
        switches="use-bnb-optimizer",
    ),
    **_flags(
        "one learning rate serves all weights; leave the flag out",
        valued="decoupled-lr decoupled-min-lr",
    ),
    **_flags(
        "one learning rate serves all weights; leave the flag out",
        valued="head-lr-mult",
        same=("1",),
    ),
    **_flags(
        "give --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples", valued="warmup"
    ),
    **_flags(
        "the schedule is that of the command line; give the first run's flags instead",
        switches="use-checkpoint-lr-scheduler use-checkpoint-opt_param-scheduler",
    ),
    **_flags(
        "iterations cannot be left out yet; leave the flag out",
        lists="skip-train-iteration-range",
    ),
    # Data.
    **_flags(
        "samples come in one order, drawn from --seed; leave the flag out",
        valued="dataloader-type",
        same=("single",),
    ),
    **_flags(
        "the data repeats as often as the run needs, reshuffled; leave the flag out",
        switches="repeated-dataloader",
        valued="train-data-exact-num-epochs",
    ),
    **_flags(
        "every token of a sample is trained on (--eod-mask-loss leaves out the end-of-document "
        "token); leave the flag out",
        switches="loss-on-targets-only reweight-loss-based-on-position-frequency",
    ),
    **_flags(
        "indexes are built from the token files and cached (--data-cache-path); leave the flag out",
        valued="train-desc-path train-doc-idx-path train-idx-path train-sample-idx-path "
        "train-shuffle-idx-path",
    ),
    **_flags(
        "make token files with tools/preprocess_data.py and give --data-path",
        switches="mock-data test-mode",
    ),
    **_flags(
        "the data must lie in a file system; give its path in --data-path",
        valued="aml-data-download-path s3-cache-path",
    ),
    **_flags(
        "DeepSpeed's data-efficiency library is not used; leave the flag out",
        switches="data-efficiency-curriculum-learning random-ltd return-data-index",
    ),
    **_flags("datasets alone are built by no program here", valued="use-dataset-only"),
    # Checkpoints.
    **_flags(
        _NO_WEIGHTS,
        switches="finetune no-load-optim reset-iteration",
        valued="pretrained-checkpoint",
    ),
    **_flags(
        "a checkpoint holds all that a resume needs; leave the flag out", switches="no-save-optim"
    ),
    **_flags(
        "a resume needs the layout of the first run (tensor-parallel size, processes, ZeRO "
        "stage); leave the flag out",
        switches="universal-checkpoint",
    ),
    **_flags(
        "give the model's flags as in the first run; a difference is an error that names it",
        switches="use-checkpoint-args",
    ),
    **_flags("give --load the folder and --ckpt-step the iteration", valued="load-tag"),
    # Programs and safety.
    **_flags(
        "give --skip-train, which evaluates and trains nothing (in the fork, any word after "
        "--eval-only means yes)",
        valued="eval-only",
    ),
    **_flags(
        "text is generated by tools/generate_samples_gpt.py", switches="inference ds-inference"
    ),
    **_flags("distillation is not there; leave the flag out", switches="kd mos"),
    **_flags(
        "replicas are not compared; leave the flag out",
        valued="check-weight-hash-across-dp-replicas-interval",
    ),
    **_flags(
        "runs repeat bit for bit on a CPU; on other devices nothing promises it. Leave the flag "
        "out",
        switches="deterministic-mode",
    ),
    **_flags(
        "requeue with your scheduler: a signal saves, and --load resumes",
        switches="adlr-autoresume",
    ),
    **_flags("give each setting as a flag", valued="yaml-cfg"),
    **_flags("give --deepspeed", switches="deepscale"),
    **_flags("give --deepspeed_config FILE", valued="deepscale_config"),
}
"""Flags that would change the run and are not supported: what to do instead."""

_OLD_FORMAT = (
    "the lazy and cached formats are not read; make new token files with tools/preprocess_data.py"
)
_BY_JSON = "give its tokenizer.json with --tokenizer-type HFTokenizer --tokenizer-model FOLDER"

REFUSED_VALUES: dict[str, dict[str, str]] = {
    "data_impl": {"lazy": _OLD_FORMAT, "cached": _OLD_FORMAT},
    "tokenizer_type": dict.fromkeys(("Llama3Tokenizer", "MistralTokenizer"), _BY_JSON),
}
"""Values that a peer takes and we do not: field -> value -> what it is or what to do."""

PREPROCESS_WITHOUT_EFFECT: dict[str, ForeignFlag] = {
    **_flags(
        "the input is not cut; --workers divides the work, and the files are the same",
        valued="partitions",
    ),
    **_flags("documents always keep their order", switches="keep-sequential-samples"),
    **_flags(
        "only the model's vocabulary is padded; the token files do not depend on it",
        valued="make-vocab-size-divisible-by pad-vocab-size-to",
    ),
    **_flags("samples are cut by the training, not by the token files", valued="seq-length"),
    **_flags("the fork never read it", lists="datasets"),
}
"""The same for tools/preprocess_data.py."""

DEFAULTS: dict[str, tuple[str, str, str]] = {
    "accumulate-allreduce-grads-in-fp32": (
        "off, but on with `--bf16`",
        "on",
        "with `--fp16`, too, gradients are summed in fp32; "
        "`--no-accumulate-allreduce-grads-in-fp32` gives the peers' sums",
    ),
    "distributed-backend": ("nccl", "the accelerator's", "gloo on a CPU, nccl on NVIDIA's devices"),
    "initial-loss-scale": (
        "2^32 (under DeepSpeed not read: 2^16)",
        "65536 (2^16)",
        "fewer steps are skipped at the start of a run in fp16",
    ),
    "num-query-groups": (
        "1, read with `--group-query-attention` only",
        "the number of heads",
        "the flag alone is enough for grouped-query attention",
    ),
    "tokenizer-type": ("none, it must be given", "GPT2BPETokenizer", ""),
}
"""Flags whose default here is not the peers': theirs, ours, and what that means."""
