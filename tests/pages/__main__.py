"""Writes the generated pages: flags.md, support_matrix.md, deepspeed_keys.md and changes.md of
docs/reference, verified.md and the import diagram of architecture.md of docs/development,
engines.md of docs/use, the families of docs/training/model.md, the example of
docs/running/planning.md with its picture, docs/running/measured.md, and the figures of
examples/recipes."""

from benchmarks.accelerator.certificate_files import RefusedFileError
from tests import import_graph
from tests.pages import (
    changes,
    deepspeed_keys,
    engines,
    families,
    flags,
    measured,
    plan_example,
    recipes,
    support_matrix,
    verified,
)

PAGES = (
    flags,
    support_matrix,
    deepspeed_keys,
    changes,
    engines,
    import_graph,
    families,
    plan_example,
    measured,
    recipes,
    verified,
)
for module in PAGES:
    try:
        text = module.page()
    except RefusedFileError as error:
        raise SystemExit(str(error)) from None
    module.OUTPUT.write_text(text, encoding="utf-8")
    print(f"wrote {module.OUTPUT}")
plan_example.draw()
recipes.write()
