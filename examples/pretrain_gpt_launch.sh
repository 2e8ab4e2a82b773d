#!/bin/bash
# torch's older launcher, with activation checkpointing.
# README.md in this folder lists the variables.
set -euo pipefail
cd "$(dirname "$0")/.."

python -m torch.distributed.launch \
    --nproc_per_node "${PROCESSES:-8}" \
    --nnodes 1 \
    --node_rank 0 \
    --master_addr localhost \
    --master_port "${PORT:-6000}" \
    pretrain_gpt.py \
    --num-layers "${LAYERS:-24}" \
    --hidden-size "${HIDDEN:-1024}" \
    --num-attention-heads "${HEADS:-16}" \
    --micro-batch-size "${MICRO:-8}" \
    --global-batch-size "${GLOBAL:-64}" \
    --seq-length "${SEQ:-1024}" \
    --max-position-embeddings "${SEQ:-1024}" \
    --train-iters "${ITERS:-500000}" \
    --lr-decay-iters 320000 \
    --save "${CHECKPOINTS:-checkpoints/gpt2_345m}" \
    --load "${CHECKPOINTS:-checkpoints/gpt2_345m}" \
    --data-path "${DATA:-data/my-gpt2_text_document}" \
    --vocab-file "${VOCAB:-gpt2-vocab.json}" \
    --merge-file "${MERGES:-gpt2-merges.txt}" \
    --data-impl mmap \
    --split 949,50,1 \
    --distributed-backend nccl \
    --lr 0.00015 \
    --lr-decay-style cosine \
    --min-lr 1.0e-5 \
    --weight-decay 1e-2 \
    --clip-grad 1.0 \
    --lr-warmup-fraction .01 \
    --checkpoint-activations \
    --log-interval "${LOG_INTERVAL:-100}" \
    --save-interval 10000 \
    --eval-interval 1000 \
    --eval-iters "${EVAL_ITERS:-10}" \
    ${PRECISION:---fp16} \
    "$@"
