#!/bin/bash
# Tensor parallelism over four processes, ZeRO 3 with the optimizer on the CPU, from a DeepSpeed file
# in old syntax. README.md in this folder lists the variables.
set -euo pipefail
cd "$(dirname "$0")/.."

# PORT: DeepSpeed's default is 29500.
deepspeed --num_gpus "${PROCESSES:-4}" ${PORT:+--master_port "$PORT"} pretrain_gpt.py \
    --tensor-model-parallel-size "${PROCESSES:-4}" \
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
    --data-path "${DATA:-data/my-gpt2_text_document}" \
    --vocab-file "${VOCAB:-gpt2-vocab.json}" \
    --merge-file "${MERGES:-gpt2-merges.txt}" \
    --data-impl mmap \
    --split 700,200,100 \
    --log-interval "${LOG_INTERVAL:-100}" \
    --save-interval 10000 \
    --eval-interval 1000 \
    --eval-iters "${EVAL_ITERS:-10}" \
    --save "${CHECKPOINTS:-checkpoints/gpt2_345m_zero3}" \
    --load "${CHECKPOINTS:-checkpoints/gpt2_345m_zero3}" \
    ${PRECISION:---fp16} \
    --deepspeed_config "${DS_CONFIG:-examples/deepspeed_config.json}" \
    "$@"
