"""Writes the generated pages: flags.md, support_matrix.md and deepspeed_keys.md of docs/reference,
verified.md and the import diagram of architecture.md of docs/development, and the example of
docs/running/planning.md with its picture."""

from tests import import_graph
from tests.pages import deepspeed_keys, flags, plan_example, support_matrix, verified

for module in (flags, support_matrix, deepspeed_keys, import_graph, plan_example, verified):
    module.OUTPUT.write_text(module.page(), encoding="utf-8")
    print(f"wrote {module.OUTPUT}")
plan_example.draw()
