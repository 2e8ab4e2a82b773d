#!/bin/bash
# A server for a checkpoint and its client. README.md in this folder lists the variables.
set -euo pipefail
cd "$(dirname "$0")/.."

PORT=${PORT:-5000}

# LAUNCHER="torchrun --nproc_per_node 2" PROCESSES=2 shards the model over two processes.
${LAUNCHER:-python} tools/run_text_generation_server.py \
    --tensor-model-parallel-size "${PROCESSES:-1}" \
    --pipeline-model-parallel-size 1 \
    --num-layers "${LAYERS:-24}" \
    --hidden-size "${HIDDEN:-1024}" \
    --num-attention-heads "${HEADS:-16}" \
    --seq-length "${SEQ:-1024}" \
    --max-position-embeddings "${SEQ:-1024}" \
    --load "${CHECKPOINTS:-checkpoints/gpt2_345m}" \
    --tokenizer-type GPT2BPETokenizer \
    --vocab-file "${VOCAB:-gpt2-vocab.json}" \
    --merge-file "${MERGES:-gpt2-merges.txt}" \
    ${PRECISION:---fp16} \
    --micro-batch-size 1 \
    --out-seq-length "${SEQ:-1024}" \
    --temperature 1.0 \
    --top_p 0.9 \
    --seed 42 \
    --port "$PORT" \
    "$@" &
SERVER=$!
trap 'kill $SERVER 2>/dev/null || true; wait $SERVER || true' EXIT

# The port opens before the model is loaded, so the first response takes longer.
until (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do
    kill -0 $SERVER || exit 1
    sleep 1
done
python tools/text_generation_cli.py "127.0.0.1:$PORT"
