"""Writes the generated pages: flags.md and support_matrix.md of docs/reference, and the import
diagram of docs/development/architecture.md."""

from tests import import_graph
from tests.pages import flags, support_matrix

for module in (flags, support_matrix, import_graph):
    module.OUTPUT.write_text(module.page(), encoding="utf-8")
    print(f"wrote {module.OUTPUT}")
