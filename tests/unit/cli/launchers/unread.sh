#!/bin/bash
for node in $(scontrol show hostnames); do
    echo $node
done
setup() {
    LAYERS=12
}
setup
case "$(hostname)" in
  large) LAYERS=48 ;;
  *) LAYERS=24 ;;
esac
while read -r line; do echo; done < hosts
if [ "$(hostname)" = login ]; then
    exit 1
fi
WORKERS=$(nproc)
HIDDEN=${HIDDEN^^}
torchrun pretrain_gpt.py --num-layers 2 --num-workers $WORKERS --load $CHECKPOINT --hidden-size 64
