#!/bin/bash
# Preprocessing, then a batch size ramp-up with tensor parallelism over two processes, a DeepSpeed
# file and full logging. README.md in this folder lists the variables.
set -euo pipefail
cd "$(dirname "$0")/.."

DATA=${DATA:-data/my-gpt2}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt2_rampup}

[ -f "${DATA}_text_document.idx" ] || python tools/preprocess_data.py \
    --input "${INPUT:-my-corpus.jsonl}" \
    --output-prefix "$DATA" \
    --vocab "${VOCAB:-gpt2-vocab.json}" \
    --merge-file "${MERGES:-gpt2-merges.txt}" \
    --dataset-impl mmap \
    --tokenizer-type GPT2BPETokenizer \
    --append-eod \
    --workers "${WORKERS:-20}"

python -u -m torch.distributed.run \
    --nproc_per_node 2 \
    --nnodes 1 \
    --rdzv_endpoint "localhost:${PORT:-6777}" \
    --rdzv_backend c10d \
    --max_restarts 0 \
    --tee 3 \
    pretrain_gpt.py \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 1 \
    --distributed-backend nccl \
    --num-layers "${LAYERS:-24}" \
    --hidden-size "${HIDDEN:-1024}" \
    --num-attention-heads "${HEADS:-16}" \
    --seq-length "${SEQ:-1024}" \
    --max-position-embeddings "${SEQ:-1024}" \
    --micro-batch-size 1 \
    --rampup-batch-size 2 2 1_000 \
    --global-batch-size 16 \
    --train-samples 10_000 \
    --optimizer adam \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --adam-eps 1e-8 \
    --lr 1e-4 \
    --lr-warmup-samples 5 \
    --min-lr 1e-6 \
    --lr-decay-style cosine \
    --lr-decay-samples 12 \
    --clip-grad 1.0 \
    --weight-decay 1e-1 \
    --embed-layernorm \
    ${PRECISION:---fp16} \
    --partition-activations \
    --seed 42 \
    --vocab-file "${VOCAB:-gpt2-vocab.json}" \
    --merge-file "${MERGES:-gpt2-merges.txt}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    --save-interval 100 \
    --eval-interval 100 \
    --eval-iters "${EVAL_ITERS:-10}" \
    --checkpoint-activations \
    --exit-interval "${EXIT_INTERVAL:-100}" \
    --save "$CHECKPOINTS" \
    --load "$CHECKPOINTS" \
    --data-path "${DATA}_text_document" \
    --tensorboard-dir "${TENSORBOARD:-$CHECKPOINTS/tensorboard}" \
    --tensorboard-queue-size 5 \
    --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    --kill-switch-path "${KILL_SWITCH:-$CHECKPOINTS/stop}" \
    --deepspeed \
    --deepspeed_config "${DS_CONFIG:-examples/ds_config_rampup.json}" \
    --zero-stage 1 \
    --deepspeed-activation-checkpointing \
    "$@"
