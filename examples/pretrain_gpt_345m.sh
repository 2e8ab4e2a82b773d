#!/bin/bash
# One process, 345 million parameters. README.md in this folder lists the variables.
set -euo pipefail
cd "$(dirname "$0")/.."

torchrun pretrain_gpt.py \
    --num-layers "${LAYERS:-24}" \
    --hidden-size "${HIDDEN:-1024}" \
    --num-attention-heads "${HEADS:-16}" \
    --seq-length "${SEQ:-1024}" \
    --max-position-embeddings "${SEQ:-1024}" \
    --micro-batch-size "${MICRO:-1}" \
    --global-batch-size "${GLOBAL:-2}" \
    --lr 0.00015 \
    --train-iters "${ITERS:-5000}" \
    --lr-decay-iters 320000 \
    --lr-decay-style cosine \
    --min-lr 1.0e-5 \
    --weight-decay 1e-2 \
    --lr-warmup-fraction .01 \
    --clip-grad 1.0 \
    ${PRECISION:---fp16} \
    --data-path "${DATA:-data/my-gpt2_text_document}" \
    --vocab-file "${VOCAB:-gpt2-vocab.json}" \
    --merge-file "${MERGES:-gpt2-merges.txt}" \
    --data-impl mmap \
    --split 700,200,100 \
    --log-interval "${LOG_INTERVAL:-100}" \
    --save-interval 10000 \
    --eval-interval 1000 \
    --eval-iters "${EVAL_ITERS:-10}" \
    --save "${CHECKPOINTS:-checkpoints/gpt2_345m}" \
    --load "${CHECKPOINTS:-checkpoints/gpt2_345m}" \
    "$@"
