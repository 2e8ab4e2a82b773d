#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=2
CHECKPOINT_PATH=$1 #<Specify path>
DATA_PATH=${2:-"my data/text_document"}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96   # it's the largest
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size $((8 * 4 * GPUS_PER_NODE))
    --train-iters 500000
    --lr 6.0e-5
    --bf16
)
TRAINING_ARGS+=(--tensor-model-parallel-size 8)
DATA_ARGS=(--data-path "$DATA_PATH" --split 949,50,1 --tokenizer-type NullTokenizer --vocab-size 100)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    "${DATA_ARGS[@]}" --save $CHECKPOINT_PATH $MORE_ARGS
