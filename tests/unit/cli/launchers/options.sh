#!/bin/bash
dir=`pwd`
seq_len=2048
train_tokens_in_billion=300
train_tokens=$((${train_tokens_in_billion} * 1000000000))
num_gpus=$(($(ds_ssh nvidia-smi --query-gpu=name | wc -l)-2))
zero_stage=1
prescale_grad="true"
jobname="gpt_tok${train_tokens_in_billion}B_g${num_gpus}"
if [[ $zero_stage -gt 0 ]]; then
    jobname="${jobname}_z${zero_stage}"
    prescale_grad="false"
fi
megatron_options=" \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length ${seq_len} \
    --micro-batch-size 4 --train-tokens ${train_tokens} --lr 2.0e-4 --fp16 \
    --data-path p --tokenizer-type NullTokenizer --vocab-size 100"
if [ "${activation_checkpoint:-true}" = "true" ]; then
megatron_options="${megatron_options} \
    --checkpoint-activations"
fi
config_json="ds_config_zero${zero_stage}.json"
sed "s/ZERO_STAGE/${zero_stage}/" template.json \
    | sed "s/PRESCALE_GRAD/${prescale_grad}/" \
      > ${config_json}
deepspeed_options=" \
    --deepspeed \
    --deepspeed_config ${config_json} \
    --zero-stage ${zero_stage}"
deepspeed ${dir}/../../pretrain_gpt.py ${megatron_options} ${deepspeed_options} &>> log/${jobname}.log
