#!/bin/bash
for node in a b; do
    echo $node
done
setup() {
    LAYERS=12
}
setup
case "$MODE" in
  large) LAYERS=48 ;;
  *) LAYERS=24 ;;
esac
while true; do break; done
if [ "$(hostname)" = login ]; then
    exit 1
fi
WORKERS=$(nproc)
HIDDEN=${HIDDEN^^}
torchrun pretrain_gpt.py --num-layers 2 --num-workers $WORKERS --load $CHECKPOINT --hidden-size 64
