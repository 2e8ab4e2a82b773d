"""Writes the generated pages: flags.md, support_matrix.md and deepspeed_keys.md of docs/reference,
and the import diagram of docs/development/architecture.md."""

from tests import import_graph
from tests.pages import deepspeed_keys, flags, support_matrix

for module in (flags, support_matrix, deepspeed_keys, import_graph):
    module.OUTPUT.write_text(module.page(), encoding="utf-8")
    print(f"wrote {module.OUTPUT}")
