"""Cleanings, also by the scripts of the peers, that are killed again and again with SIGKILL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ds.cleaning import find_duplicates as duplicates_module
from megatron_ds.cleaning import url_lists
from megatron_ds.cleaning.pipeline import clean
from megatron_ds.fileio.resumable import RECORD
from tests.cleaning_runs import corpus, everything, files, write
from tests.faults import is_killed_at
from tests.pages.flags import REPOSITORY, load


def kill_everywhere(
    reset: Callable[[], object], run: Callable[[], object], check: Callable[[], object]
) -> int:
    """Kills runs before each rename and at every fourth flush; returns the number of kills."""
    kills = 0
    for name, numbers in (("replace", range(1, 100)), ("fsync", range(1, 1000, 4))):
        for number in numbers:
            reset()
            if not is_killed_at(f"os.{name}:{number}", run):
                break
            kills += 1
            check()
        else:
            pytest.fail(f"the run called os.{name} more often than it was tried")
    return kills


def test_a_run_that_is_killed_anywhere_ends_with_uninterrupted_output(tmp_path: Path) -> None:
    """Killed once, and then again on its way.

    Claim (cleaning): a cleaning run that is killed at any point and resumed ends with the bytes of
    an uninterrupted one
    """
    corpus(tmp_path)
    clean(everything(tmp_path))
    wanted = files(tmp_path)

    def reset() -> None:
        for path in tmp_path.iterdir():
            if path.name != "in.jsonl":
                path.unlink()

    def check() -> None:
        is_killed_at("os.replace:2", lambda: clean(everything(tmp_path, resume=True)))
        clean(everything(tmp_path, resume=True))
        assert files(tmp_path) == wanted

    assert kill_everywhere(reset, lambda: clean(everything(tmp_path)), check) >= 10


def duplicates(folder: Path) -> list[str]:
    """The command; its two files have duplicates of each other."""
    texts = [" ".join(f"w{(number // 3) * 7 + at}" for at in range(60)) for number in range(300)]
    write(folder / "1.jsonl", *({"text": text, "id": f"n{at}"} for at, text in enumerate(texts)))
    words = texts[0]
    write(folder / "2.jsonl", {"text": words, "url": 5}, {"text": words, "url": "é"})
    inputs = [str(folder / "1.jsonl"), "id", str(folder / "2.jsonl"), "url"]
    return ["--inputs", *inputs, "--output", str(folder / "out")]


def addresses(folder: Path) -> list[str]:
    for number in range(2):
        lines = (f"https://a{at % 80}.org/{'x.pdf' * (at % 7 == 0)}" for at in range(100))
        (folder / f"{number}.txt").write_text("\n".join(lines) + f"\nhttps://{number}.org/\n")
    return [str(folder), str(folder / "out")]


@pytest.mark.parametrize(
    ("name", "made"), [("find_duplicates.py", duplicates), ("blacklist_urls.py", addresses)]
)
def test_peer_scripts_resume_after_a_kill(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    made: Callable[[Path], list[str]],
) -> None:
    """The same list, and the same counts."""
    monkeypatch.setattr(duplicates_module, "COMMIT_DOCUMENTS", 64)
    monkeypatch.setattr(url_lists, "COMMIT_URLS", 20)
    main = load(REPOSITORY / "tools" / "openwebtext" / name).main
    asked = made(tmp_path)
    assert main(asked) == 0
    said = capsys.readouterr().out
    wanted = files(tmp_path)
    assert len(wanted["out"]) > 1000

    def check() -> None:
        capsys.readouterr()
        if (tmp_path / "out.work" / RECORD).exists():
            assert main(asked) == 1
            assert "[interrupted-run-exists]" in capsys.readouterr().err
        assert main([*asked, "--resume"]) == 0
        assert capsys.readouterr().out == said
        assert files(tmp_path) == wanted

    assert kill_everywhere((tmp_path / "out").unlink, lambda: main(asked), check) >= 8
