#!/usr/bin/env bash
# One would guess: the config.json that OLMo-core writes into each checkpoint (Config.as_config_dict) gives, read back
#        with from_dict, the settings of the run.
# True:  OLMo-core 3.0.0 leaves out what is None, so a field whose default is something else returns as that
#        default, without a warning: the loss of balanced experts that was off has weight 0.01, and a run that kept
#        all checkpoints keeps three and deletes the others. A WSD schedule with its decay in steps is an error.
# Hurt:  whoever continues, copies or converts a run by the configuration in its checkpoint.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0
"$work/env/bin/pip" install --quiet ai2-olmo-core==3.0.0
"$work/env/bin/python" - 2>/dev/null <<'PY'
from importlib.metadata import version

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.moe import MoEConfig
from olmo_core.optim.scheduler import WSD
from olmo_core.train.callbacks import CheckpointerCallback
from olmo_core.train.config import TrainerConfig

print("ai2-olmo-core", version("ai2-olmo-core"))
experts = MoEConfig(num_experts=4, hidden_size=16, lb_loss_weight=None)
saving = CheckpointerCallback(max_checkpoints=None)
trainer = TrainerConfig(save_folder="run", callbacks={"checkpointer": saving})
recorded = TrainerConfig.from_dict(trainer.as_config_dict())
weights = (experts.lb_loss_weight, MoEConfig.from_dict(experts.as_config_dict()).lb_loss_weight)
kept = (saving.max_checkpoints, recorded.callbacks["checkpointer"].max_checkpoints)
print(f"MoEConfig.lb_loss_weight: {weights[0]}, read back {weights[1]}")
print(f"CheckpointerCallback.max_checkpoints: {kept[0]}, read back {kept[1]}")
assert weights == (None, 0.01) and kept == (None, 3), "the behaviour has changed"

schedule = WSD(warmup=10, decay=100, decay_fraction=None)
try:
    WSD.from_dict(schedule.as_config_dict())
except OLMoConfigurationError as error:
    print(f"WSD(warmup=10, decay=100, decay_fraction=None), read back: {error}")
else:
    raise AssertionError("the behaviour has changed")
PY
