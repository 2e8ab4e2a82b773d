set -ex
NUM_NODES=${HL_NUM_NODES:-1}
DP=${HL_DP:-2}
TP=${HL_TP:-2}
PP=${HL_PP:-2}
HOSTSFILE=${HL_HOSTSFILE:-}
LLAMA_VER=${HL_LLAMA_VER:-2}
SIZE=${HL_LLAMA_MODEL_SIZE:-70}
POSITION=${HL_POSITION:-rotary}

if [ $((NUM_NODES*8)) -ne $((DP*TP*PP)) ]; then
    echo "NUM_NODES*DEVICES_PER_NODE != DP*TP*PP"
    exit 1
fi
if [ "$LLAMA_VER" = "1" ]; then
    SEQ_LEN=2048
elif [ "$LLAMA_VER" = "2" ]; then
    SEQ_LEN=${HL_SEQ_LEN:-4096}
    if [ $SIZE -eq 70 ]; then
        NHEADS=64 # must be divisible by TP
        NUM_KV_HEADS=$((NHEADS/8))
    else
        echo "incorrect size"
        exit 1
    fi
else
    exit 1
fi
MULTINODE_CMD=""
if [ "$NUM_NODES" -ne "1" -a -f "$HOSTSFILE" ]; then
    MULTINODE_CMD="--hostfile=$HOSTSFILE --master_addr $(head -n 1 $HOSTSFILE)"
fi
CMD="python3 -u /software/pretrain_gpt.py \
    --num-layers 80 --hidden-size 8192 --num-attention-heads ${NHEADS} --seq-length ${SEQ_LEN} \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --micro-batch-size 1 \
    --train-iters 10 --lr 1e-4 --data-path d --tokenizer-type NullTokenizer --vocab-size 100"
if [ "$LLAMA_VER" != "1" ] && [ $NHEADS -ne $NUM_KV_HEADS ]; then
    CMD="${CMD} --num-key-value-heads $NUM_KV_HEADS"
fi
if [[ "$POSITION" = "rotary" || "$POSITION" == "rope*" ]]; then
    CMD="${CMD} --use-rotary-position-embeddings"
fi
if [ ! -z "$HL_KILL_SWITCH" ]; then
    CMD="${CMD} --kill-switch-path $HL_KILL_SWITCH"
fi
deepspeed --num_gpus 8 \
          --num_nodes ${NUM_NODES} \
          --no_local_rank \
          --no_python \
          $MULTINODE_CMD \
          /usr/bin/bash -c "$CMD" #2>&1 | tee log.txt
