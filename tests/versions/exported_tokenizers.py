"""Compares exported tokenizers in other versions of transformers with the tokenizers of the runs.

    python tests/versions/exported_tokenizers.py 5.24.0 4.57.6

The folders are those of tests/unit/conversion/test_exported_tokenizers.py. Each version is
installed alone into a temporary environment from the package index. Ends with status 1 if
AutoTokenizer of one gives other ids than the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.unit.conversion import test_exported_tokenizers as exports  # noqa: E402

READER = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer
folder = Path(sys.argv[1])
count = different = 0
for name, expected in json.loads((folder / "expected.json").read_text()).items():
    loaded = AutoTokenizer.from_pretrained(folder / name)
    for text, ids in expected.items():
        count += 1
        if loaded(text)["input_ids"] != ids:
            different += 1
            print(f"{name}: other ids for {text!r}")
print(f"{count - different} of {count} texts have the ids of the run")
sys.exit(different > 0)
"""


def write_folders(folder: Path) -> None:
    """Writes the exports, and the ids of the runs as expected.json."""
    expected = {}
    for name in exports.CASES:
        training = folder / f"{name}-model"
        training.mkdir()
        tokenizer, _, _ = exports.exported(exports.config_of(name, training), folder / name)
        texts = [*exports.TEXTS, *exports.SPECIAL]
        expected[name] = {text: tokenizer.encode(text) for text in texts}
    (folder / "expected.json").write_text(json.dumps(expected))


def main() -> None:
    status = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "exports")
        folder.mkdir()
        write_folders(folder)
        for version in sys.argv[1:]:
            environment = Path(temporary, version)
            subprocess.run([sys.executable, "-m", "venv", environment], check=True)
            python = environment / "bin" / "python"
            install = [python, "-m", "pip", "install", "-q", f"transformers=={version}"]
            subprocess.run(install, check=True)
            print(f"transformers {version}:", flush=True)
            status |= subprocess.run([python, "-c", READER, folder], check=False).returncode
    sys.exit(status)


if __name__ == "__main__":
    main()
