"""Learning rates of OLMo-core's schedules: python olmo_core_rates.py PEAK LAST CASES, as JSON."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from unittest.mock import MagicMock

for name in ("cached_path", "cached_path.schemes", "cached_path.schemes.scheme_client"):
    sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))

if __name__ == "__main__":
    from olmo_core.optim import scheduler

    peak, last, cases = sys.argv[1:]
    rates = []
    for settings in json.loads(cases):
        kind = getattr(scheduler, settings.pop("_CLASS_").rpartition(".")[2])
        schedule = kind(**settings)
        steps = range(1, int(last) + 3)
        rates.append([schedule.get_lr(float(peak), step, int(last)) for step in steps])
    print(json.dumps(rates))
